"""The CRD is a structural schema with defaults and bounds, and says what the models say."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from orbit_runtime.spec import OrbitRun
from orbit_runtime.spec.block import MODEL_ON_HUB, PROMPTS_ON_HUB
from orbit_runtime.spec.cel import compile_cel
from orbit_runtime.spec.crd import CHECKS, LIST_TYPES, TRANSITIONS, build_crd, build_schema
from orbit_runtime.spec.fields import all_fields
from orbit_runtime.spec.hub_address import is_model_address, parse_address
from tools.reference.generate import render_crd

ALLOWED = {
    "type", "description", "enum", "pattern", "format", "default", "properties", "required", "items",
    "additionalProperties", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength",
    "minItems", "maxItems", "maxProperties", "x-kubernetes-validations", "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
}  # fmt: skip
"""Of `JSONSchemaProps`, what this schema needs: `$ref` and `anyOf` are not among it."""
TYPES = {"object", "array", "string", "integer", "number", "boolean"}


ANYTHING = {"nullable": True, "x-kubernetes-preserve-unknown-fields": True}
"""What the user puts there, null included."""


def walk(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}".lstrip("."))
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")
    if schema.get("additionalProperties") not in (None, ANYTHING):
        yield from walk(schema["additionalProperties"], f"{path}.*")


SCHEMA = build_schema()
NODES = dict(walk(SCHEMA))


@pytest.mark.parametrize("path", NODES)
def test_every_bound_of_a_number_is_one_for_whole_numbers_too(path: str) -> None:
    bounds = [NODES[path][name] for name in ("minimum", "maximum") if name in NODES[path]]
    assert all(-(2**63) <= bound < 2**63 for bound in bounds)


@pytest.mark.parametrize("path", NODES)
def test_every_place_is_structural(path: str) -> None:
    node = NODES[path]
    assert set(node) <= ALLOWED
    assert node["type"] in TYPES
    assert not ("properties" in node and "additionalProperties" in node)
    assert ("items" in node) == (node["type"] == "array")
    if node["type"] == "object":
        kinds = ("properties", "additionalProperties")
        assert path == "metadata" or sum(kind in node for kind in kinds) == 1
    assert set(node.get("required", [])) <= set(node.get("properties", {}))
    for bound in ("exclusiveMinimum", "exclusiveMaximum"):
        assert isinstance(node.get(bound, True), bool)


@pytest.mark.parametrize("path", [path for path in NODES if path.startswith("spec")])
def test_every_value_is_bounded(path: str) -> None:
    """CEL's cost is estimated from the bounds; an unbounded text or list makes a rule too expensive."""
    node = NODES[path]
    bound = {"string": "maxLength", "array": "maxItems", "integer": "maximum", "number": "maximum"}.get(node["type"])
    assert bound is None or "enum" in node or bound in node
    if node["type"] == "object" and "properties" not in node:
        assert "maxProperties" in node


def test_a_required_field_has_no_default_and_every_other_block_is_filled_in() -> None:
    for node in NODES.values():
        for name in node.get("required", []):
            assert "default" not in node["properties"][name]
    filled = [path for path, node in NODES.items() if "default" in node and "properties" in node]
    assert "spec.adapter" in filled
    assert "spec.rollout.sampling" in filled
    assert "spec.adapter.oft" not in filled


def test_the_default_of_a_block_with_rules_is_written_out() -> None:
    """The API server refuses a CRD whose default breaks a rule, and looks before it fills in nested defaults."""
    algorithm = NODES["spec.algorithm"]["default"]
    assert algorithm["kl"] == {"coefficient": 0.0, "importanceWeighted": False}
    assert algorithm["clip"] == {}, "the type decides"
    assert algorithm["importanceSampling"] == NODES["spec.algorithm.importanceSampling"]["default"] == {"type": "None"}
    assert NODES["spec.parity"]["default"] == {}
    for path in CHECKS:
        filled = {name for name, node in NODES[path].get("properties", {}).items() if "default" in node}
        if "default" in NODES[path]:
            assert set(NODES[path]["default"]) == filled


def test_the_defaults_are_those_of_the_models() -> None:
    least = {
        "apiVersion": "orbitrl.dev/v1alpha1",
        "kind": "OrbitRun",
        "metadata": {"name": "x"},
        "spec": {
            "model": {"uri": "m"},
            "data": {"prompts": [{"uri": "p"}]},
            "environment": {"rewards": [{"name": "a", "type": "Math"}]},
            "training": {"steps": 3},
        },
    }
    filled = fill({"spec": least["spec"]}, SCHEMA)["spec"]
    by_model = OrbitRun.model_validate(least).to_manifest()["spec"]
    # What depends on another field has no default in a CRD.
    del by_model["adapter"]["lora"]
    for reward in by_model["environment"]["rewards"]:
        del reward["arguments"]
    del by_model["rollout"]["engineArguments"], by_model["rollout"]["sampling"]["logitBias"]
    del (
        by_model["placement"]["nodeSelector"],
        by_model["placement"]["pod"],
        by_model["data"]["chat"]["templateArguments"],
    )
    del by_model["environment"]["arguments"]
    assert filled == by_model


def fill(value: Any, schema: dict[str, Any]) -> Any:
    """As the API server fills in defaults."""
    if isinstance(value, dict) and "properties" in schema:
        out = dict(value)
        for name, child in schema["properties"].items():
            if name not in out and "default" in child:
                out[name] = child["default"]
            if name in out:
                out[name] = fill(out[name], child)
        return out
    return [fill(item, schema["items"]) for item in value] if isinstance(value, list) else value


def test_every_field_of_the_manifest_is_in_the_schema() -> None:
    spec = [field.path for field in all_fields() if field.path.startswith("spec")]
    assert [path for path in spec if path not in NODES] == []


def test_rules_and_list_types_stand_where_they_are_meant_to() -> None:
    for path in {**CHECKS, **TRANSITIONS}:
        rules = [*CHECKS.get(path, ()), *TRANSITIONS.get(path, ())]
        assert NODES[path]["x-kubernetes-validations"] == rules
    for path in LIST_TYPES:
        assert NODES[path]["type"] == "array"
    assert all("x-kubernetes-list-type" in node for node in NODES.values() if node["type"] == "array")


def test_the_object_has_its_names_and_a_status_of_its_own() -> None:
    crd = build_crd()
    assert crd["metadata"]["name"] == "orbitruns.orbitrl.dev"
    assert crd["spec"]["names"]["shortNames"] == ["orun"]
    (version,) = crd["spec"]["versions"]
    assert version["subresources"] == {"status": {}}
    assert NODES["status.conditions"]["x-kubernetes-list-map-keys"] == ["type"]


def test_every_field_of_the_spec_is_immutable_but_those_that_are_meant_to_change() -> None:
    blocks = set(NODES["spec"]["properties"])
    assert {path.removeprefix("spec.") for path in TRANSITIONS} == blocks
    blamed = [rule["fieldPath"] for rule in TRANSITIONS["spec.lifecycle"]]
    assert set(NODES["spec.lifecycle"]["properties"]) - {field[1:] for field in blamed} == {
        "suspend",
        "ttlSecondsAfterFinished",
    }
    (queue,) = [rule for rule in TRANSITIONS["spec.lifecycle"] if rule["fieldPath"] == ".queueName"]
    assert "oldSelf.suspend" in queue["rule"]


def test_the_file_is_the_same_each_time() -> None:
    assert render_crd() == render_crd()


def test_whoever_changes_the_schema_changes_a_copy() -> None:
    before = json.dumps(build_schema())
    changed = build_schema()
    changed["properties"]["spec"]["properties"]["placement"]["properties"]["layout"]["enum"].clear()
    assert json.dumps(build_schema()) == before


def says(cel: str, uri: str) -> bool:
    return bool(compile_cel(cel)({"self": SimpleNamespace(uri=uri)}))


def is_prompts_address(uri: str) -> bool:
    address = parse_address(uri)
    return address is not None and address.path is not None


def test_the_api_server_takes_the_addresses_on_a_hub_that_the_runtime_takes() -> None:
    """Every address of up to four of these pieces; the API server's own answers are in `tests/cluster/corpus.py`."""
    pieces = ("datasets/", "org/name", "org", "/file", "/", "@main", "@", "/..", "?", "ä")
    taken = 0
    for count in range(1, 5):
        for parts in itertools.product(pieces, repeat=count):
            uri = "hf://" + "".join(parts)
            if uri.strip("/") == "hf:":
                continue
            assert says(MODEL_ON_HUB.cel, uri) == is_model_address(uri), uri
            assert says(PROMPTS_ON_HUB.cel, uri) == is_prompts_address(uri), uri
            taken += is_model_address(uri) + is_prompts_address(uri)
    assert taken > 100
    assert says(MODEL_ON_HUB.cel, "models/x")
    assert says(MODEL_ON_HUB.cel, "hf://${MODEL}")
