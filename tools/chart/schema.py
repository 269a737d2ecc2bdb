"""`values.schema.json`: the type of a value is that of its default, and what else it must be stands in `BOUNDS`.

Belongs here: bounds, and the schema as Helm reads it (draft 7). Does not belong here: defaults and texts (values.yaml).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orbit_runtime.spec.crd import build_schema as build_crd_schema
from orbit_runtime.spec.placement import OWN_VARIABLE, POD_FIELDS
from tools.chart.values_file import Value

Schema = dict[str, Any]

NAMESPACE: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
QUANTITY: Schema = {"type": ["string", "number"], "pattern": "^[0-9]+(\\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"}
_AMOUNTS: Schema = {"type": "object", "additionalProperties": QUANTITY}
_STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_TEXTS: Schema = {"items": {"type": "string", "minLength": 1}}
_PULL_POLICY: Schema = {"enum": ["Always", "IfNotPresent", "Never"]}
_DIGEST: Schema = {"pattern": "^(sha256:[0-9a-f]{64})?$"}
_DURATION: Schema = {"pattern": "^([0-9]+(ms|s|m|h|d))+$"}
_NAME: Schema = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string", "minLength": 1}},
                 "additionalProperties": False}  # fmt: skip
_KEPT = (
    "type",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
)
_RESERVED = (
    r"^([^/]+\.)?orbitrl\.dev/|^batch\.kubernetes\.io/"
    r"|^app\.kubernetes\.io/(name|instance|component|part-of|managed-by)$|^(controller-uid|job-name)$"
)
_OBJECT_NAME = "^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$"
_PORTS: Schema = {"items": {"type": "integer", "minimum": 1, "maximum": 65535}, "minItems": 1}
_NETWORKS: Schema = {"items": {"type": "string", "pattern": "/[0-9]{1,3}$"}}
_POD_KEYS: Schema = {**_STRINGS, "patternProperties": {_RESERVED: False}}


def _of_manifest(name: str) -> Schema:
    """What the CRD says of a field of `spec.placement`, as far as draft 7 can say it; the operator checks the rest."""
    placement = build_crd_schema()["properties"]["spec"]["properties"]["placement"]
    return _plain(placement["properties"][name])


def _plain(schema: Mapping[str, Any]) -> Schema:
    found = {key: schema[key] for key in _KEPT if key in schema}
    if "properties" in schema:
        found["properties"] = {name: _plain(child) for name, child in schema["properties"].items()}
        found["additionalProperties"] = False
    elif "additionalProperties" in schema:
        found["additionalProperties"] = _plain(schema["additionalProperties"])
    if "items" in schema:
        found["items"] = _plain(schema["items"])
    return found


BOUNDS: dict[str, Schema] = {
    "watchNamespaces": {"items": NAMESPACE, "uniqueItems": True},
    "image.repository": {"minLength": 1},
    "image.digest": _DIGEST,
    "image.pullPolicy": _PULL_POLICY,
    "imagePullSecrets": {"items": _NAME},
    "runs.image.repository": {"minLength": 1},
    "runs.image.digest": _DIGEST,
    "runs.imagePullPolicy": _PULL_POLICY,
    "runs.imagePullSecrets": {"items": {"anyOf": [_TEXTS["items"], _NAME]}},
    "runs.cpu": {"minimum": 0, "maximum": 1024},
    "runs.cpuRequestPerGPU": {"type": "number", "minimum": 0, "maximum": 128},
    "runs.memory": {"type": "string", "pattern": f"^$|{QUANTITY['pattern']}"},
    "runs.nodeSelector": _of_manifest("nodeSelector"),
    "runs.tolerations": _of_manifest("tolerations"),
    "runs.egress": _of_manifest("egress"),
    "runs.env": {
        **_STRINGS,
        "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
        "patternProperties": {f"^({OWN_VARIABLE.pattern})$": False},
    },
    "runs.caConfigMap": {"pattern": _OBJECT_NAME},
    "runs.runAsUser": {"type": ["integer", "null"], "minimum": 1},
    "runs.priorityClassName": {"pattern": _OBJECT_NAME},
    "runs.queueName": {"pattern": "^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"},
    # Of a bad `propertyNames` Helm would tell another place.
    "runs.pod": {"properties": {name: {} for name in POD_FIELDS}, "additionalProperties": False},
    "runs.podLabels": {**_STRINGS, "patternProperties": {rf"{_RESERVED}|^kueue\.x-k8s\.io/": False}},
    "runs.podAnnotations": _POD_KEYS,
    "runs.ttlSecondsAfterFinished": {"minimum": -1},
    "fences.maxGPUs": {"minimum": 0},
    "fences.images": _TEXTS,
    "fences.secrets": _TEXTS,
    "fences.serviceAccounts": _TEXTS,
    "operator.logLevel": {"enum": ["Debug", "Info", "Warning", "Error"]},
    "operator.workers": {"minimum": 1, "maximum": 64},
    "operator.pollSeconds": {"type": "number", "minimum": 1},
    "operator.pollConnections": {"minimum": 1, "maximum": 1000},
    "operator.progressSeconds": {"type": "number", "minimum": 0},
    "operator.resyncSeconds": {"type": "number", "minimum": 1},
    "operator.nodeLostSeconds": {"type": "number", "minimum": 1},
    "operator.leaseSeconds": {"type": "number", "minimum": 5},
    "resources": {
        "properties": {"requests": _AMOUNTS, "limits": _AMOUNTS, "claims": {"type": "array"}},
        "additionalProperties": False,
    },
    "runAsUser": {"type": ["integer", "null"], "minimum": 1},
    "nodeSelector": _STRINGS,
    "tolerations": {"items": {"type": "object"}},
    "affinity": {
        "properties": {kind: {"type": "object"} for kind in ("nodeAffinity", "podAffinity", "podAntiAffinity")},
        "additionalProperties": False,
    },
    "podAnnotations": _STRINGS,
    "podLabels": _STRINGS,
    "serviceAccount.annotations": _STRINGS,
    "networkPolicy.scrapeNamespaces": {"items": NAMESPACE, "uniqueItems": True},
    "networkPolicy.dnsPorts": _PORTS,
    "networkPolicy.apiServerPorts": _PORTS,
    "networkPolicy.httpsCIDRs": _NETWORKS,
    "networkPolicy.apiServerCIDRs": _NETWORKS,
    "monitoring.additionalLabels": _STRINGS,
    "monitoring.serviceMonitor.interval": _DURATION,
    "monitoring.podMonitor.interval": _DURATION,
    "monitoring.podMonitor.sampleLimit": {"minimum": 200},
    "monitoring.rules.labels": _STRINGS,
    "monitoring.rules.disabled": {"items": {"type": "string"}, "uniqueItems": True},
    "monitoring.rules.limits.noProgressSeconds": {"type": "number", "minimum": 60},
    "monitoring.rules.limits.klFloor": {"type": "number", "minimum": 0},
    "monitoring.rules.limits.klFactor": {"type": "number", "exclusiveMinimum": 1},
    "monitoring.rules.limits.checkpointStaleSeconds": {"type": "number", "minimum": 60},
    "monitoring.rules.limits.restartsPerHour": {"minimum": 1},
    "monitoring.rules.limits.engineRestartsPerHour": {"minimum": 1},
    "monitoring.rules.limits.pendingFor": _DURATION,
    "monitoring.rules.limits.watchStalledSeconds": {"type": "number", "minimum": 60},
    "monitoring.dashboards.label": {"minLength": 1},
    "monitoring.dashboards.folderAnnotation": {"minLength": 1},
}
"""Path: what the default's type does not say. Lists and free objects must have a row."""

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def build_schema(values: list[Value]) -> Schema:
    """The schema. Unknown keys are refused at every level; `global`, which Helm itself adds to subcharts, is not."""
    root = _block()
    for value in values:
        *parents, name = value.path.split(".")
        node = root
        for parent in parents:
            node = node["properties"].setdefault(parent, _block())
        node["properties"][name] = _describe(value)
    unused = set(BOUNDS) - {value.path for value in values}
    if unused:
        raise ValueError(f"tools/chart/schema.py: bounds of values that do not exist: {sorted(unused)}")
    root["properties"]["global"] = {"type": "object", "description": "Helm's own: values shared with a parent chart."}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart orbit", **root}


def _block() -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": {}}


def _describe(value: Value) -> Schema:
    bounds = BOUNDS.get(value.path, {})
    if isinstance(value.default, list | dict) and not bounds:
        raise ValueError(f"tools/chart/schema.py: {value.path} needs a row in BOUNDS")
    kind = _TYPES.get(type(value.default))
    return {"description": value.text, **({"type": kind} if kind else {}), **bounds}
