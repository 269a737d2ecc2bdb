"""Any manifest whose fields are each allowed, drawn from the same description that the CRD is made from.

Belongs here: the strategies. Does not belong here: what must hold of such a manifest (the tests).
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from orbit_runtime.spec.fields import Schema, is_block, is_free, schema_tree

WORDS = st.text("abcxyz0189-_. é'\"#:{}", min_size=1, max_size=8)
PLACES = st.sampled_from(["m", "/abs/x", "builtin://a", "file:///x", "010", "on", "1:30", "a b: c", "ü"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
PATTERNS = {
    "entrypoint": st.just("a.b:c"),
    "tools": st.lists(st.just("a.b:c"), max_size=3),
    "name": st.from_regex(r"\A[a-z][a-z0-9]{0,7}\Z"),
    "uri": PLACES,
    "cidr": st.sampled_from(["10.0.0.0/8", "fd00::/8"]),
    "url": st.sampled_from(["http://engine:30000", "http://127.0.0.1:30000"]),
    "variables": st.lists(st.sampled_from(["OPENAI_API_KEY", "_k"]), max_size=3),
    "apiKeyEnv": st.sampled_from(["ENGINE_KEY", "_k"]),
    "urlEnv": st.sampled_from(["HOOK", "_h"]),
    "valueEnv": st.sampled_from(["TEAM", "x1"]),
    "adapterFolder": st.sampled_from(["/shared", "/dev/shm/a"]),
    "logitBias": st.dictionaries(st.integers(0, 10**6).map(str), st.floats(-100, 100), max_size=3),
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
        keys, values = (WORDS, JSON_VALUES) if is_free(schema) else (KEYS, KEYS)
        return st.dictionaries(keys, values, max_size=3)
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


def manifests() -> st.SearchStrategy[dict[str, Any]]:
    """Whole manifests; fields of one may contradict each other."""
    return blocks_of(schema_tree())
