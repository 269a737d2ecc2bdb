"""The input of every object of a run, and what these objects have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orbit_runtime.spec import OrbitRun
from orbit_runtime.spec.run import API_VERSION

GROUP = "orbitrl.dev"
RUN_NAME, RUN_UID, ATTEMPT = f"{GROUP}/run-name", f"{GROUP}/run-uid", f"{GROUP}/attempt"
METRICS_PORT = 9400
"""Metrics port of a run's pod if the manifest does not set one."""

RAY_PORT = 6379
"""Port of the head of an attempt's RayCluster."""
LONGEST_NAME = 40
"""KubeRay truncates a pod's name from the front if it exceeds 50 characters together with what KubeRay adds."""

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunSource:
    """One run as the API server has it. `spec` is the raw block with defaults; `manifest` is the same, typed."""

    namespace: str
    name: str
    uid: str
    spec: Mapping[str, Any]
    manifest: OrbitRun
    installed: Mapping[str, Any] = field(default_factory=dict)
    """What the installation adds to pods of runs."""

    @property
    def pod(self) -> Mapping[str, Any]:
        """What is added to this run's pods; the manifest takes precedence."""
        merged: Mapping[str, Any] = merge(dict(self.installed), self.manifest.spec.placement.pod)
        return merged


def merge(base: Any, added: Any) -> Any:
    """Mappings are merged, lists are joined, and everything else is replaced."""
    if isinstance(base, dict) and isinstance(added, dict):
        return base | {name: merge(base[name], each) if name in base else each for name, each in added.items()}
    return [*base, *added] if isinstance(base, list) and isinstance(added, list) else added


def metrics_port_of(spec: Mapping[str, Any]) -> int | None:
    """The port of a run's pods, or `None` if the run exposes none."""
    port: int = (spec.get("observability") or {}).get("metricsPort", 0)
    return None if port < 0 else port or METRICS_PORT


def job_name(run: str, attempt: int) -> str:
    return f"{run}-a{attempt}"


def ranks_name(run: str, attempt: int) -> str:
    """Begins with a letter, as KubeRay requires; a digest keeps long names distinct."""
    name = f"ranks-{run}-a{attempt}"
    if len(name) <= LONGEST_NAME:
        return name
    digest, end = hashlib.sha256(run.encode()).hexdigest()[:8], f"-a{attempt}"
    return f"ranks-{run}"[: LONGEST_NAME - len(digest) - len(end) - 1].rstrip("-") + f"-{digest}{end}"


def ray_address(run: str, attempt: int) -> str:
    """Address of the service that KubeRay creates for the head."""
    return f"{ranks_name(run, attempt)}-head-svc:{RAY_PORT}"


def config_map_name(run: str) -> str:
    return f"{run}-manifest"


def cleanup_name(run: str) -> str:
    return f"{run}-cleanup"


def run_folder(uri: object, name: str) -> str:
    """The folder of a run's artifacts, given `storage.uri`."""
    return f"{str(uri or '').rstrip('/')}/{name}"


def labels(source: RunSource, attempt: int | None = None, component: str = "trainer") -> dict[str, str]:
    """The labels of a child; an attempt's Job and pod also carry its number."""
    common = {
        **source.pod.get("labels", {}),
        "app.kubernetes.io/name": "orbit-run",
        "app.kubernetes.io/instance": source.name,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "orbit",
        "app.kubernetes.io/managed-by": "orbit-operator",
        RUN_NAME: source.name,
        RUN_UID: source.uid,
    }
    return common if attempt is None else {**common, ATTEMPT: str(attempt)}


def metadata(source: RunSource, name: str, attempt: int | None = None, component: str = "trainer") -> Object:
    """Metadata of a child that is deleted with its run."""
    return {
        "name": name,
        "namespace": source.namespace,
        "labels": labels(source, attempt, component),
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": "OrbitRun",
                "name": source.name,
                "uid": source.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
