"""The RayCluster with the trainer's ranks, for an attempt over several nodes. KubeRay creates its pods."""

from __future__ import annotations

from orbit_operator.facts import RANKS_CONTAINER
from orbit_operator.manifests.job import put_into_queue
from orbit_operator.manifests.mounts import build_mounts
from orbit_operator.manifests.pod import (
    build_container,
    build_node_selector,
    build_pod_metadata,
    build_tolerations,
    build_volumes,
    customise,
    installed_variables,
    node_affinity,
    pod_security,
)
from orbit_operator.manifests.source import RAY_PORT, Object, RunSource, labels, metadata, ranks_name
from orbit_operator.settings import Settings

API_VERSION = "ray.io/v1"
COMPONENT = RANKS_CONTAINER
AGENT_PORT = 9500
HEAD_RESOURCES = {name: {"cpu": "1", "memory": "4Gi"} for name in ("requests", "limits")}
"""Resources for Ray's daemons, and for an object store that takes 30 % of the memory."""
NOT_OF_HEAD = ("affinity", "topologySpreadConstraints", "resourceClaims", "resources")
"""Fields of `placement.pod` that are for the pods with GPUs."""


def build_ray_cluster(source: RunSource, attempt: int, settings: Settings) -> Object:
    """One node for ranks for each of `placement.nodes` but the first, which the run's own pod uses. To a queue it is a
    workload of its own, admitted before the run's Job exists."""
    placement = source.manifest.spec.placement
    ranks = placement.nodes - 1
    head = metadata(source, ranks_name(source.name, attempt), attempt, COMPONENT)
    return {
        "apiVersion": API_VERSION,
        "kind": "RayCluster",
        "metadata": head,
        "spec": {
            "suspend": put_into_queue(head, source, settings),
            "enableInTreeAutoscaling": False,
            "headGroupSpec": {
                "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "include-dashboard": "false"},
                "template": _template(source, settings, RAY_PORT, head=True),
            },
            "workerGroupSpecs": [
                {
                    "groupName": COMPONENT,
                    "replicas": ranks,
                    "minReplicas": ranks,
                    "maxReplicas": ranks,
                    "rayStartParams": {"num-gpus": str(placement.gpus), "node-manager-port": str(AGENT_PORT)},
                    "template": _template(source, settings, AGENT_PORT, head=False),
                }
            ],
        },
    }


def _template(source: RunSource, settings: Settings, port: int, *, head: bool) -> Object:
    """A pod without the credentials for the run's store: ranks read the model and write nothing."""
    spec, placement = source.manifest.spec, source.manifest.spec.placement
    extra_volumes, extra_mounts = build_mounts(source.spec, settings)
    run = build_container(source, 0, extra_mounts, settings)
    probe = {"tcpSocket": {"port": port}, "periodSeconds": 10, "failureThreshold": 6}
    container: Object = {
        # KubeRay supplies the command: `ray start` with the parameters of the group.
        **{name: run[name] for name in ("image", "imagePullPolicy", "workingDir", "securityContext")},
        "name": COMPONENT,
        "env": [
            {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
            *(each for each in run["env"] if each["name"] == "ORBIT_CACHE"),
            *installed_variables(settings),
        ],
        "envFrom": [{"secretRef": {"name": name}} for name in placement.env_from_secrets],
        "resources": HEAD_RESOURCES if head else run["resources"],
        "volumeMounts": [each for each in run["volumeMounts"] if each["name"] != "manifest"],
        "livenessProbe": probe,
        "readinessProbe": probe,
    }
    pod: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(settings),
        "containers": [container],
        "volumes": [
            *(each for each in build_volumes(source) if each["name"] != "manifest"),
            *extra_volumes,
        ],
        "tolerations": build_tolerations(placement, settings),
        "terminationGracePeriodSeconds": min(30, spec.lifecycle.termination_grace_period_seconds),
    }
    if settings.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    if settings.run_priority_class:
        pod["priorityClassName"] = settings.run_priority_class
    if not head:
        if selector := build_node_selector(placement, settings):
            pod["nodeSelector"] = selector
        if affinity := node_affinity(placement, ()):
            pod["affinity"] = {"nodeAffinity": affinity}
    template = {"metadata": build_pod_metadata(labels(source, component=COMPONENT), settings), "spec": pod}
    return customise(source, template, NOT_OF_HEAD if head else ())
