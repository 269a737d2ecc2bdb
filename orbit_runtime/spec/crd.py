"""The manifest as a Kubernetes CustomResourceDefinition.

Belongs here: the structural schema, made from the same models, and how two of them differ.
Does not belong here: what only CEL can say (`rules`), or writing the file (`generate`).
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from orbit_runtime.spec.fields import Schema, is_block, schema_tree, status_tree
from orbit_runtime.spec.rules import CHECKS, rules_at

GROUP, VERSION, PLURAL = "orbitrl.dev", "v1alpha1", "orbitruns"

LIST_TYPES: dict[str, Schema] = {
    "spec.adapter.targets": {"x-kubernetes-list-type": "set"},
    "spec.environment.rewards": {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    "spec.rollout.endpoints": {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["url"]},
    "spec.algorithm.teacher.endpoints": {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["url"]},
    "spec.evaluation.environments": {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    "spec.evaluation.environments[].environment.rewards": {
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["name"],
    },
    "spec.placement.envFromSecrets": {"x-kubernetes-list-type": "set"},
    "spec.placement.egress[].ports": {"x-kubernetes-list-type": "set"},
    "status.attempts": {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["number"]},
    "status.conditions": {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
}
"""How lists merge under server-side apply; every other one is atomic."""

COLUMNS = (
    ("Phase", "string", ".status.phase", 0),
    ("Reason", "string", ".status.reason", 0),
    ("Step", "integer", ".status.step", 0),
    ("Reward", "number", ".status.reward", 0),
    ("Attempt", "integer", ".status.attempt", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Model", "string", ".spec.model.uri", 1),
    ("Precision", "string", ".spec.model.precision", 1),
    ("Adapter", "string", ".spec.adapter.type", 1),
    ("Queue", "string", ".spec.lifecycle.queueName", 1),
    ("Node", "string", ".status.node", 1),
    ("Checkpoint", "integer", ".status.checkpoint.step", 1),
)
"""As `kubectl get orun` prints them; those of priority 1 with `-o wide`."""

_NAME: Schema = {"type": "string", "maxLength": 253}
"""Named so that a rule can blame it, bounded for the rule's cost; nothing else of the metadata may stand in a CRD."""
_KEPT = (
    "type", "format", "description", "enum", "pattern",
    "minLength", "maxLength", "minItems", "maxItems", "maxProperties",
)  # fmt: skip


def build_crd() -> dict[str, Any]:
    """The whole object, as it is written to `crds/`."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": _build_spec(),
    }


def _build_spec() -> dict[str, Any]:
    names = {"kind": "OrbitRun", "listKind": "OrbitRunList", "plural": PLURAL, "singular": "orbitrun"}
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, **({"priority": level} if level else {})}
            for name, kind, path, level in COLUMNS
        ],
        "schema": {"openAPIV3Schema": build_schema()},
    }
    return {
        "group": GROUP,
        "names": {**names, "shortNames": ["orun"], "categories": ["orbit"]},
        "scope": "Namespaced",
        "versions": [version],
    }


def build_schema() -> Schema:
    """Structural OpenAPI v3 schema of the object; the caller's own."""
    tree = schema_tree()
    schema: Schema = {
        "type": "object",
        "description": tree["description"],
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": dict.fromkeys(("name", "generateName"), _NAME)},
            "spec": _structural(tree["properties"]["spec"], "spec"),
            "status": _structural(status_tree(), "status"),
        },
        "x-kubernetes-validations": _rules(""),
    }
    return deepcopy(schema)


def _structural(schema: Schema, path: str) -> Schema:
    out: Schema = {key: schema[key] for key in _KEPT if key in schema}
    if schema.get("type") == "integer":
        out["format"] = "int64"
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if bound in schema:
            out[bound] = schema[bound]
        elif exclusive in schema:
            out[bound], out[exclusive] = schema[exclusive], True
    if is_block(schema):
        out["properties"] = {name: _structural(child, f"{path}.{name}") for name, child in schema["properties"].items()}
        if schema.get("required"):
            out["required"] = schema["required"]
        elif "default" in schema:
            out["default"] = _own_defaults(schema) if path in CHECKS else {}
    elif "items" in schema:
        out["items"] = _structural(schema["items"], f"{path}[]")
        out.update(LIST_TYPES.get(path, {"x-kubernetes-list-type": "atomic"}))
    elif schema.get("type") == "object":
        values = schema.get("additionalProperties")
        if isinstance(values, dict):
            out["additionalProperties"] = _structural(values, f"{path}.*")
        else:
            # On the values and not on the mapping, whose keys CEL would then not compare.
            out["additionalProperties"] = {"nullable": True, "x-kubernetes-preserve-unknown-fields": True}
    if "default" in schema and not is_block(schema):
        out["default"] = schema["default"]
    if rules_at(path):
        out["x-kubernetes-validations"] = _rules(path)
    return out


def _own_defaults(schema: Schema) -> Schema:
    """The API server holds a block's default against its rules before it fills in the defaults of its fields."""
    return {
        name: _own_defaults(child) if is_block(child) else child["default"]
        for name, child in schema["properties"].items()
        if "default" in child and not child.get("optional")
    }


def _rules(path: str) -> list[Schema]:
    return [
        {"rule": rule.cel, "message": rule.message, **({"fieldPath": rule.field} if rule.field else {})}
        for rule in rules_at(path)
    ]
