"""The manifest as a Kubernetes CustomResourceDefinition.

Belongs here: the structural schema, made from the same models, and the rules that only CEL can say there.
Does not belong here: writing the file (`generate`).
"""

from __future__ import annotations

from typing import Any

from orbit_runtime.spec.adapter import NEUMANN_TERMS
from orbit_runtime.spec.algorithm import TRUNCATION_CAP
from orbit_runtime.spec.fields import Schema, is_block, schema_tree, status_tree
from orbit_runtime.spec.run import LABEL, NAME_LENGTH

GROUP, VERSION, PLURAL = "orbitrl.dev", "v1alpha1", "orbitruns"

Rule = tuple[str, str]

RULES: dict[str, tuple[Rule, ...]] = {
    "": (
        (f"size(self.metadata.name) <= {NAME_LENGTH}", f"metadata.name: at most {NAME_LENGTH} characters"),
        (
            f"self.metadata.name.matches('{LABEL}')",
            "metadata.name: lower-case letters, digits and '-', with a letter or digit at both ends",
        ),
    ),
    "spec": (
        ("self == oldSelf", "spec cannot change: start a new run"),
        (
            "self.rollout.sampling.maxNewTokens < self.model.maxSequenceLength",
            "rollout.sampling.maxNewTokens must leave room for a prompt within model.maxSequenceLength",
        ),
    ),
    "spec.adapter": (
        ("self.type == 'LoRA' || !has(self.lora)", "lora is only allowed with type LoRA"),
        ("self.type == 'OFT' || !has(self.oft)", "oft is only allowed with type OFT"),
    ),
    "spec.adapter.oft": (
        (
            f"self.parametrization != 'Cayley' || self.neumannTerms == {NEUMANN_TERMS}",
            "neumannTerms does nothing with parametrization Cayley",
        ),
    ),
    "spec.algorithm.clip": (("self.low <= self.high", "low must not be above high"),),
    "spec.algorithm.importanceSampling": (
        (f"self.type != 'None' || self.cap == {TRUNCATION_CAP:.1f}", "cap does nothing with type None"),
    ),
    "spec.environment.rewards[]": (
        ("has(self.type) != has(self.entrypoint)", "a reward has either a type or an entrypoint"),
    ),
    "spec.training": (
        (
            "!has(self.miniBatchPrompts) || self.promptsPerStep % self.miniBatchPrompts == 0",
            "miniBatchPrompts must divide promptsPerStep",
        ),
        (
            "self.schedule.type == 'Constant' || has(self.schedule.decaySteps)"
            " || self.schedule.warmupSteps < self.steps",
            "schedule.warmupSteps must end before the last step",
        ),
    ),
    "spec.training.schedule": (
        ("self.type != 'Constant' || !has(self.decaySteps)", "decaySteps does nothing with type Constant"),
        ("!has(self.decaySteps) || self.decaySteps > self.warmupSteps", "decaySteps must be after the warm-up"),
    ),
}
"""CEL by path: the same contradictions that the loader finds."""

LIST_TYPES: dict[str, Schema] = {
    "spec.adapter.targets": {"x-kubernetes-list-type": "set"},
    "spec.environment.rewards": {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
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

_KEPT = (
    "type", "format", "description", "enum", "pattern",
    "minLength", "maxLength", "minItems", "maxItems", "maxProperties",
)  # fmt: skip


def build_crd() -> dict[str, Any]:
    """The whole object, as it is written to `crds/`."""
    names = {"kind": "OrbitRun", "listKind": "OrbitRunList", "plural": PLURAL, "singular": "orbitrun"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {**names, "shortNames": ["orun"], "categories": ["orbit"]},
            "scope": "Namespaced",
            "versions": [
                {
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
            ],
        },
    }


def build_schema() -> Schema:
    """Structural OpenAPI v3 schema of the object."""
    tree = schema_tree()
    return {
        "type": "object",
        "description": tree["description"],
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _structural(tree["properties"]["spec"], "spec"),
            "status": _structural(status_tree(), "status"),
        },
        "x-kubernetes-validations": _rules(""),
    }


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
            out["default"] = _own_defaults(schema) if path in RULES else {}
    elif "items" in schema:
        out["items"] = _structural(schema["items"], f"{path}[]")
        out.update(LIST_TYPES.get(path, {"x-kubernetes-list-type": "atomic"}))
    elif schema.get("type") == "object":
        values = schema.get("additionalProperties")
        if isinstance(values, dict):
            out["additionalProperties"] = _structural(values, f"{path}.*")
        else:
            out["x-kubernetes-preserve-unknown-fields"] = True
    if "default" in schema and not is_block(schema):
        out["default"] = schema["default"]
    if path in RULES:
        out["x-kubernetes-validations"] = _rules(path)
    return out


def _own_defaults(schema: Schema) -> Schema:
    """The API server holds a block's default against its rules before it fills in the defaults of its fields."""
    return {
        name: child["default"]
        for name, child in schema["properties"].items()
        if not is_block(child) and "default" in child
    }


def _rules(path: str) -> list[Schema]:
    return [{"rule": rule, "message": message} for rule, message in RULES[path]]
