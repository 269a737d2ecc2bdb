"""The manifest as a Kubernetes CustomResourceDefinition.

Belongs here: the structural schema, made from the same models, and the rules that only the API server has: of the
name, and of what may not change. Does not belong here: the blocks' rules, or writing the file (`generate`).
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from orbit_runtime.spec.block import Block, Rule, Unique, inner_blocks
from orbit_runtime.spec.fields import Schema, is_block, schema_tree, status_tree
from orbit_runtime.spec.run import NAME_LENGTH, NAME_PATTERN, Lifecycle, OrbitRun, RunSpec

GROUP, VERSION, PLURAL = "orbitrl.dev", "v1alpha1", "orbitruns"

MUTABLE = ("suspend", "queueName", "ttlSecondsAfterFinished")
"""Fields of `spec.lifecycle` that may change, `queueName` only while the run is suspended."""
_FIXED = "cannot change once the run exists: start a new run"

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
"""Columns of `kubectl get orun`; those of priority 1 with `-o wide`."""

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
        "x-kubernetes-validations": NAME_RULES,
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
    rules = [*CHECKS.get(path, ()), *TRANSITIONS.get(path, ())]
    if rules:
        out["x-kubernetes-validations"] = rules
    return out


def _own_defaults(schema: Schema) -> Schema:
    """The API server holds a block's default against its rules before it fills in the defaults of its fields."""
    return {
        name: _own_defaults(child) if is_block(child) else child["default"]
        for name, child in schema["properties"].items()
        if "default" in child and not child.get("optional")
    }


def _blocks(kind: type[Block], path: str = "") -> Iterator[tuple[str, type[Block]]]:
    """Every place that holds a block, such as `spec.data.prompts[]`, with its kind."""
    yield path, kind
    for inner in inner_blocks(kind):
        yield from _blocks(inner.kind, f"{path}.{inner.alias}".lstrip(".") + "[]" * inner.is_list)


def _validation(cel: str, message: str, field: str = "") -> Schema:
    return {"rule": cel, "message": message, **({"fieldPath": f".{field}"} if field else {})}


def _lifecycle_rules() -> Iterator[Schema]:
    for field in Lifecycle.model_fields.values():
        if field.alias not in MUTABLE:
            yield _validation(_same(str(field.alias)), _FIXED, str(field.alias))
    message = "can change only while the run is suspended: set suspend: true first"
    yield _validation(f"oldSelf.suspend || ({_same('queueName')})", message, "queueName")


def _same(name: str) -> str:
    """Spelled out: the cost of comparing two optional texts is estimated as unbounded."""
    return f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || self.{name} == oldSelf.{name})"


_BLOCKS = dict(_blocks(OrbitRun))
_LIST_KEYS = {
    f"{path}.{rule.field}": rule.key
    for path, kind in _BLOCKS.items()
    for rule in kind.rules
    if isinstance(rule, Unique)
}
LIST_TYPES: dict[str, Schema] = {
    path: {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    if key
    else {"x-kubernetes-list-type": "set"}
    for path, key in {**_LIST_KEYS, "status.attempts": "number", "status.conditions": "type"}.items()
}
"""Type of merging under server-side apply, by path of the list; all other lists are atomic."""
CHECKS = {
    path: rules
    for path, kind in _BLOCKS.items()
    if (
        rules := [
            _validation(rule.whole, rule.hint, rule.field)
            for rule in kind.rules
            if isinstance(rule, Rule) and rule.server
        ]
    )
}
"""Path → checks of a new object. A rule is silent where a field that it rests on is itself out of bounds, which the
server has said already."""
NAME_RULES = [
    _validation(
        f"size(self.metadata.name) <= {NAME_LENGTH} && self.metadata.name.matches('{NAME_PATTERN}')",
        f"write at most {NAME_LENGTH} lower-case letters, digits and '-', with a letter or digit at both ends",
        "metadata.name",
    ),
    _validation(
        "!has(self.metadata.generateName)",
        "write name instead: the run folder is called like it",
        "metadata.generateName",
    ),
]
"""Rules that the loader checks by the fields of `metadata`, which a CRD cannot describe."""
TRANSITIONS: dict[str, list[Schema]] = {
    **{
        f"spec.{field.alias}": [_validation("self == oldSelf", _FIXED)]
        for name, field in RunSpec.model_fields.items()
        if name != "lifecycle"
    },
    "spec.lifecycle": [*_lifecycle_rules()],
}
"""Path → checks of an object's change."""
