"""The operator's settings, read from environment variables, with the defaults that an installation adds to every run.

Belongs here: the table, its defaults and its check. Does not belong here: anything about a single run (its manifest).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import orjson
from pydantic import ValidationError

from orbit_runtime.errors import UsageError
from orbit_runtime.spec.block import VARIABLE_PATTERN, is_label_key, is_label_value
from orbit_runtime.spec.placement import OWN_VARIABLE, RESERVED, Egress, Placement, Toleration
from orbit_runtime.spec.run import find_contradictions

PREFIX = "ORBIT_OPERATOR_"
PRIORITY_CLASS = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?")
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
NOTHING: Mapping[str, str] = MappingProxyType({})


FIX = "correct `runs` in the chart's values"


def read_node_selector(where: str, text: str) -> Mapping[str, str]:
    return _read_placement(where, "nodeSelector", text).node_selector


def read_tolerations(where: str, text: str) -> tuple[Toleration, ...]:
    return _read_placement(where, "tolerations", text).tolerations


def read_egress(where: str, text: str) -> tuple[Egress, ...]:
    return _read_placement(where, "egress", text).egress


def read_pod(where: str, text: str) -> Mapping[str, Any]:
    return _read_placement(where, "pod", text).pod


def read_labels(where: str, text: str) -> Mapping[str, str]:
    """Labels of a run's pod."""
    labels = read_annotations(where, text)
    for key, value in labels.items():
        if not is_label_value(value):
            raise UsageError(f"`{value}` cannot be the value of a label", where=f"{where}: {key}", fix=FIX)
        if key.startswith("kueue.x-k8s.io/"):
            fix = "set `runs.pod.labels`, which the Job has too, or `runs.queueName` in the chart's values"
            raise UsageError("Kueue reads this label of a Job, and not of its pod", where=f"{where}: {key}", fix=fix)
    return labels


def read_annotations(where: str, text: str) -> Mapping[str, str]:
    """Annotations of a run's pod."""
    pairs = _read_texts(where, text)
    for key in pairs:
        if not is_label_key(key):
            raise UsageError("this cannot be the key of a label or an annotation", where=f"{where}: {key}", fix=FIX)
        if RESERVED.fullmatch(key):
            raise UsageError("this key is set by Orbit or by Kubernetes", where=f"{where}: {key}", fix=FIX)
    return pairs


def read_variables(where: str, text: str) -> Mapping[str, str]:
    """Environment variables of a run's containers."""
    pairs = _read_texts(where, text)
    for name in pairs:
        if not re.fullmatch(VARIABLE_PATTERN, name) or OWN_VARIABLE.fullmatch(name):
            raise UsageError("Orbit sets this variable, or it cannot be one", where=f"{where}: {name}", fix=FIX)
    return pairs


READERS: dict[str, Callable[[str, str], Any]] = {
    "run_node_selector": read_node_selector,
    "run_tolerations": read_tolerations,
    "run_egress": read_egress,
    "run_env": read_variables,
    "run_pod": read_pod,
    "run_pod_labels": read_labels,
    "run_pod_annotations": read_annotations,
}
"""Readers of settings that are JSON. Each takes the variable's name and text, and raises UsageError."""


def _read_placement(where: str, name: str, text: str) -> Placement:
    """A `placement` block with this one field."""
    try:
        placement = Placement.model_validate({name: _read_json(where, text)}, by_name=False)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        raise UsageError(found["msg"], where=f"{where}: {_path(found['loc'])}", fix=FIX) from None
    for each in find_contradictions(placement):
        raise UsageError(each.message, where=f"{where}: {_path(each.at)}", fix=f"{each.fix}; {FIX}")
    return placement


def _read_texts(where: str, text: str) -> dict[str, str]:
    pairs = _read_json(where, text)
    if not isinstance(pairs, dict) or not all(isinstance(value, str) for value in pairs.values()):
        raise UsageError("a mapping of texts is expected", where=where, fix=f"{FIX}; quote numbers, true and false")
    return pairs


def _path(parts: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in parts)


def _read_json(where: str, text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"this is not JSON: {error}", where=where, fix=FIX) from None


@dataclass(frozen=True, slots=True)
class Settings:
    """One field is one variable: `metrics_port` is `ORBIT_OPERATOR_METRICS_PORT`.

    Lists of texts are separated by commas; structured values (`READERS`) are JSON.
    """

    namespaces: tuple[str, ...] = ()
    """Namespaces that are watched; empty means all of them, which needs cluster-wide rights."""
    namespace: str = "default"
    """Namespace that the operator itself runs in, which contains its Lease."""
    identity: str = ""
    """Holder name in the Lease: the pod's name; empty uses the host's name."""
    runtime_image: str = "orbit-runtime:latest"
    """Image of a run whose manifest names none."""
    engine_image: str = ""
    """Image of the engine's container in a `Split` run; empty uses the runtime's image."""
    image_pull_policy: str = "IfNotPresent"
    """Pull policy of the containers of a run."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of pull secrets in the run's namespace."""
    run_cpu: int = 0
    """Cores of a run whose manifest states none, as request and limit; 0: `run_cpu_per_gpu` applies."""
    run_cpu_per_gpu: float = 4.0
    """Cores that such a run requests for each of its GPUs, without a limit; 0 requests none."""
    run_memory: str = ""
    """Memory of a run whose manifest states none, such as `1Ti`; empty requests no particular amount."""
    run_node_selector: Mapping[str, str] = NOTHING
    """Labels of nodes that runs may use; a manifest's own value for a key takes precedence."""
    run_tolerations: tuple[Toleration, ...] = ()
    """Taints that every run tolerates, besides those that its manifest names."""
    run_egress: tuple[Egress, ...] = ()
    """Destinations that every run may connect to, besides those that its manifest names."""
    run_env: Mapping[str, str] = NOTHING
    """Environment variables of every container of a run, such as a proxy's."""
    run_ca_config_map: str = ""
    """ConfigMap in the run's namespace whose `ca.crt` holds the authorities to trust; empty trusts the image's."""
    run_as_user: int = 65532
    """User, group and file group of a run's pods; -1 leaves them to the cluster."""
    run_priority_class: str = ""
    """PriorityClass of the pods that train; empty names none."""
    run_pod: Mapping[str, Any] = NOTHING
    """What else the pods of runs have, as in `placement.pod`, which is merged into it."""
    run_queue: str = ""
    """Kueue LocalQueue, in the run's namespace, of a run whose manifest names none; empty names none."""
    run_pod_labels: Mapping[str, str] = NOTHING
    """Additional labels of every pod of a run."""
    run_pod_annotations: Mapping[str, str] = NOTHING
    """Annotations of every pod of a run."""
    metrics_port: int = 8080
    """Port of the operator's own `/metrics`; 0 takes any free one."""
    health_port: int = 8081
    """Port of `/healthz` and `/readyz`; 0 takes any free one."""
    log_level: str = "Info"
    """`Debug`, `Info`, `Warning` or `Error`."""
    workers: int = 4
    """Number of runs processed at the same time."""
    poll_seconds: float = 15.0
    """Interval at which the pod of a live run is polled for its `/status`."""
    poll_connections: int = 16
    """Number of pods polled at the same time."""
    progress_seconds: float = 30.0
    """Minimum interval at which progress alone is written to `status`."""
    resync_seconds: float = 300.0
    """Interval after which every run that has not ended is processed again, even without an event."""
    node_lost_seconds: float = 300.0
    """Pods of a node that has not been Ready for this long count as lost: the next attempt starts elsewhere."""
    ttl_seconds: int = -1
    """Finished runs whose manifest states no lifetime are deleted after this long; -1 keeps them."""
    network_policies: bool = True
    """Whether every run gets a NetworkPolicy that denies by default."""
    dns_ports: tuple[str, ...] = ("53", "5353")
    """Ports on which a run reaches DNS: the Service's, and the one behind it, which some networks (OVN) check."""
    https_cidrs: tuple[str, ...] = ()
    """Networks that a run may reach over HTTPS without naming them; empty: any."""
    scrape_namespaces: tuple[str, ...] = ()
    """Namespaces that may read `/metrics` of a run, besides the operator's own."""
    lease_name: str = "orbit-operator"
    """Name of the Lease; operators that share it never act at the same time."""
    lease_seconds: float = 15.0
    """How long a Lease is valid without being renewed."""
    cluster_domain: str = "cluster.local"
    """DNS domain of the cluster."""

    @property
    def holder(self) -> str:
        return self.identity or socket.gethostname()


def load_settings(environ: Mapping[str, str]) -> Settings:
    """Reads the environment.

    Raises:
        UsageError: a variable has an invalid value, or is not one of the operator's.
    """
    known = {PREFIX + field.name.upper(): field for field in fields(Settings)}
    # Kubernetes itself sets ORBIT_OPERATOR_SERVICE_HOST and the like if a Service is called orbit-operator.
    for name in environ:
        if (
            name.startswith(PREFIX)
            and name not in known
            and not name.startswith((PREFIX + "SERVICE_", PREFIX + "PORT"))
        ):
            raise UsageError("there is no such setting", where=name, fix=f"one of {', '.join(sorted(known))}")
    given = {
        field.name: READERS[field.name](name, environ[name])
        if field.name in READERS
        else _read(name, environ[name], field.default)
        for name, field in known.items()
        if environ.get(name)
    }
    settings = Settings(**given)
    _check(settings)
    return settings


def _read(name: str, text: str, default: Any) -> Any:
    text = text.strip()
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(default, tuple):
            return tuple(part.strip() for part in text.split(",") if part.strip())
        return type(default)(text)
    except (KeyError, ValueError):
        kind = {bool: "true or false", int: "a whole number", float: "a number"}[type(default)]
        raise UsageError(f"`{text}` is not {kind}", where=name, fix="correct it in the Deployment") from None


def _check(settings: Settings) -> None:
    at_least = {
        "workers": 1, "poll_connections": 1, "poll_seconds": 0.1, "progress_seconds": 0.0, "resync_seconds": 1.0,
        "node_lost_seconds": 1.0, "lease_seconds": 1.0, "ttl_seconds": -1, "run_cpu": 0, "run_cpu_per_gpu": 0.0,
        "run_as_user": -1, "metrics_port": 0, "health_port": 0,
    }  # fmt: skip
    for name, bound in at_least.items():
        if not getattr(settings, name) >= bound:
            raise UsageError(
                f"must be at least {bound}", where=PREFIX + name.upper(), fix="correct it in the Deployment"
            )
    for name in settings.namespaces:
        if not NAMESPACE.fullmatch(name):
            raise UsageError(
                f"`{name}` cannot be the name of a namespace",
                where=PREFIX + "NAMESPACES",
                fix="name each one in `watchNamespaces`, without wildcards; or watch all with `clusterScope`",
            )
    if not is_label_value(settings.run_queue):
        message = f"`{settings.run_queue}` cannot be the name of a queue"
        raise UsageError(message, where=PREFIX + "RUN_QUEUE", fix="correct `runs.queueName` in the chart's values")
    if not PRIORITY_CLASS.fullmatch(settings.run_priority_class):
        raise UsageError(
            f"`{settings.run_priority_class}` cannot be the name of a PriorityClass",
            where=PREFIX + "RUN_PRIORITY_CLASS",
            fix="correct `runs.priorityClassName` in the chart's values",
        )
    if settings.log_level not in ("Debug", "Info", "Warning", "Error"):
        raise UsageError(
            f"`{settings.log_level}` is not a log level",
            where=PREFIX + "LOG_LEVEL",
            fix="Debug, Info, Warning or Error",
        )
