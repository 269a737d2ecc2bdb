"""Any run, written out and read back, is the same run."""

from __future__ import annotations

import io
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from orbit_runtime.spec import OrbitRun, parse_manifest
from orbit_runtime.spec.fields import Schema, is_block, is_free, schema_tree
from orbit_runtime.spec.run import find_contradictions

WORDS = st.text("abcxyz0189-_. é'\"#:{}", min_size=1, max_size=8)
PLACES = st.sampled_from(["m", "/abs/x", "builtin://a", "file:///x", "010", "on", "1:30", "a b: c", "ü"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
PATTERNS = {
    "entrypoint": st.just("a.b:c"),
    "name": st.from_regex(r"\A[a-z][a-z0-9]{0,7}\Z"),
    "uri": PLACES,
    "cidr": st.sampled_from(["10.0.0.0/8", "fd00::/8"]),
    "managedBy": st.just("kueue.x-k8s.io/multikueue"),
}
KEYS = st.from_regex(r"\A[a-z0-9]{1,8}\Z")
QUANTITIES = st.from_regex(r"\A[1-9][0-9]{0,3}(Ki|Gi|M)?\Z")


def values_of(name: str, schema: Schema) -> st.SearchStrategy[Any]:
    """Any allowed value of a field, drawn from the same description that the CRD is made from."""
    if is_block(schema):
        return blocks_of(schema)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if name in PATTERNS:
        return PATTERNS[name]
    kind = schema.get("type")
    if kind == "boolean":
        return st.booleans()
    if kind == "integer":
        return st.integers(schema["minimum"], schema["maximum"])
    if kind == "number":
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        open_low, open_high = "exclusiveMinimum" in schema, "exclusiveMaximum" in schema
        return st.floats(low, high, exclude_min=open_low, exclude_max=open_high)
    if kind == "array":
        most = min(3, schema["maxItems"])
        return st.lists(values_of("", schema["items"]), min_size=schema.get("minItems", 0), max_size=most)
    if kind == "object":
        return st.dictionaries(WORDS, JSON_VALUES, max_size=3) if is_free(schema) else st.dictionaries(KEYS, KEYS)
    if "Ki|" in schema.get("pattern", ""):
        return QUANTITIES
    return KEYS if "pattern" in schema else WORDS


def blocks_of(schema: Schema) -> st.SearchStrategy[dict[str, Any]]:
    every = {name: values_of(name, child) for name, child in schema["properties"].items()}
    needed = schema.get("required", [])
    return st.fixed_dictionaries(
        {name: every[name] for name in needed},
        optional={name: value for name, value in every.items() if name not in needed},
    )


def without_contradictions(value: dict[str, Any]) -> OrbitRun | None:
    """The run, with what is impossible taken out; `None` where that does not help."""
    for _ in range(4):
        run = OrbitRun.model_validate(value, by_name=False, context={"contradictions": "collect"})
        found = list(find_contradictions(run))
        if not found:
            return run
        for each in found:
            here: Any = value
            for part in each.at[:-1]:
                here = here.get(part, {}) if isinstance(here, dict) else here[int(part)]
            if isinstance(here, dict) and each.at:
                here.pop(each.at[-1], None)
            if each.at[-1:] and isinstance(each.at[-1], int):
                here[each.at[-1]]["type"] = "Math"
        for index, reward in enumerate(value["spec"]["environment"]["rewards"]):
            reward["name"] = f"reward{index}"
    return None


@settings(max_examples=60)
@given(blocks_of(schema_tree()))
def test_a_run_that_is_written_out_reads_back_the_same(value: dict[str, Any]) -> None:
    run = without_contradictions(value)
    if run is None:
        return
    written = run.to_manifest()
    assert OrbitRun.model_validate(json.loads(json.dumps(written)), by_name=False) == run
    text = json.dumps(written)
    assert parse_manifest(text, name="x", environ={}) == run


def test_a_run_written_as_block_style_yaml_reads_back_the_same() -> None:
    value = {
        "apiVersion": "orbitrl.dev/v1alpha1",
        "kind": "OrbitRun",
        "metadata": {"name": "x", "labels": {"a": "010", "b": "on"}},
        "spec": {
            "model": {"uri": "1:30"},
            "data": {"prompts": [{"uri": "1_000"}]},
            "environment": {
                "rewards": [{"name": "a", "type": "Math", "arguments": {"x": [1, 2.5, None, {"y": True}]}}]
            },
            "training": {"steps": 3, "learningRate": 1e-5},
        },
    }
    run = OrbitRun.model_validate(value)
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 1)
    yaml.default_flow_style = False
    text = io.StringIO()
    yaml.dump(run.to_manifest(), text)
    # The writer quotes what YAML 1.1 would misread; its `%YAML 1.1` line is not part of the manifest.
    body = text.getvalue().split("---\n", 1)[-1]
    assert parse_manifest(body, name="x", environ={}) == run
