"""Checks that the installed CRD is this operator's or a newer one. An older one silently drops fields.

Belongs here: comparing our CRD with the schema that the API server publishes. Does not belong here: installing the
CRD (the chart).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from orbit_operator.api import Api, ApiError, Kind
from orbit_runtime.spec.crd import GROUP, VERSION, build_schema

_log = logging.getLogger("orbit.operator")
OPENAPI = Kind("/openapi/v3", "openapi")
RULES = "x-kubernetes-validations"
KEYWORDS = (
    "type", "format", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength",
    "minItems", "maxItems", "maxProperties", "nullable", "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
)  # fmt: skip
"""Compared literally: the API server publishes them as they were written. Descriptions do not affect a run."""
NAMED = 5
"""Number of differences listed."""


async def wait_for_crd(api: Api, stopping: asyncio.Event) -> None:
    """Waits until the API server serves OrbitRuns: a kind that is missing at the start would never be watched."""
    said = False
    while not stopping.is_set():
        try:
            await api.call("GET", OPENAPI, f"/apis/{GROUP}/{VERSION}")
            # The kind is listed a little later than it is served; kopf reads this list, once only.
            groups = (await api.call("GET", OPENAPI, "/apis"))["groups"]
            if not any(group["name"] == GROUP for group in groups):
                raise ApiError(404, "NotFound", f"{GROUP} is not in /apis yet")
        except ApiError as error:
            if not said:
                _log.warning("waiting for the CRD orbitruns.%s: %s", GROUP, error)
                said = True
            await asyncio.sleep(1.0)
        else:
            return


async def find_crd_problem(api: Api) -> tuple[str, tuple[str, ...]] | None:
    """What the CRD lacks, in one line and as paths; both empty if nothing is missing. `None` if there is no answer."""
    try:
        document = await api.call("GET", OPENAPI, f"/openapi/v3/apis/{GROUP}/{VERSION}")
    except ApiError as error:
        absent = f"the CRD orbitruns.{GROUP} is not installed; apply crds/ or set crds.install in the chart"
        return (absent, ()) if error.status == 404 else None
    served = find_served(document)
    if served is None:
        return "", ()
    own = build_schema()
    missing = tuple(missing_fields(own, served))
    return describe_problem(missing, find_differences(own, served)), missing


def describe_problem(missing: Sequence[str], differences: Sequence[str]) -> str:
    """One line, or empty if there is no problem."""
    found = [*(f"it lacks {path}" for path in missing), *differences]
    if not found:
        return ""
    listed = ", ".join(found[:NAMED]) + (" …" if len(found) > NAMED else "")
    word = "older than the operator" if missing else "not the operator's"
    return f"the installed CRD is {word}: {listed}; apply crds/ of this version"


def drop_fields(status: Mapping[str, Any], missing: Iterable[str]) -> dict[str, Any]:
    """The status without fields that the CRD lacks: the API server refuses to apply unknown fields."""
    kept: Any = dict(status)
    for path in missing:
        head, *parts = path.split(".")
        if head == "status" and parts:
            kept = _without(kept, parts)
    return dict(kept)


def _without(value: Any, parts: Sequence[str]) -> Any:
    name, rest = parts[0].removesuffix("[]"), parts[1:]
    if not isinstance(value, Mapping) or name not in value:
        return value
    if not rest:
        return {key: child for key, child in value.items() if key != name}
    child = value[name]
    inner = [_without(each, rest) for each in child] if parts[0].endswith("[]") else _without(child, rest)
    return {**value, name: inner}


def find_served(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    schemas = (document.get("components") or {}).get("schemas") or {}
    for schema in schemas.values():
        kinds = schema.get("x-kubernetes-group-version-kind") or ()
        if any(each.get("kind") == "OrbitRun" for each in kinds):
            return dict(schema)
    return None


def missing_fields(own: Mapping[str, Any], served: Mapping[str, Any]) -> list[str]:
    """Paths of our fields that the served schema lacks."""
    return list(_missing({"properties": {name: own["properties"][name] for name in ("spec", "status")}}, served, ""))


def _missing(own: Mapping[str, Any], served: Mapping[str, Any], path: str) -> Iterator[str]:
    if served.get("x-kubernetes-preserve-unknown-fields"):
        return
    for name, schema in (own.get("properties") or {}).items():
        theirs = (served.get("properties") or {}).get(name)
        here = f"{path}.{name}" if path else name
        if theirs is None:
            yield here
        else:
            yield from _missing(schema, theirs, here)
            if "items" in schema:
                yield from _missing(schema["items"], theirs.get("items") or {}, f"{here}[]")


type _Pair = tuple[str, Mapping[str, Any], Mapping[str, Any]]
"""Path, our schema and the served schema of an item that both have."""


def find_differences(own: Mapping[str, Any], served: Mapping[str, Any]) -> list[str]:
    """Where the served schema accepts or refuses other values than ours, in words; fields that it lacks are omitted.

    A schema with more fields or values than ours is newer; rules that only it has are then not reported.
    """
    blocks = {name: own["properties"][name] for name in ("spec", "status")}
    pairs = [
        (path or "the object", ours, theirs)
        for path, ours, theirs in _pairs({RULES: own.get(RULES), "properties": blocks}, served, "")
    ]
    inner = pairs[1:]
    found = [f"it {what} {path}" for path, ours, theirs in inner for what in _differences(ours, theirs)]
    if not any(theirs.get(RULES) for _, _, theirs in pairs):
        return found  # An API server that publishes no rules.
    is_newer = any(_extra(name, ours, theirs) for _, ours, theirs in inner for name in ("properties", "enum"))
    for path, ours, theirs in pairs:
        known, there = _rules(ours), _rules(theirs)
        if known - there or (there - known and not is_newer):
            found.append(f"it has other rules for {path}")
    return found


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    for name in KEYWORDS:
        if ours.get(name) != theirs.get(name):
            yield f"has another {name} for"
    if ours.get("enum") and not theirs.get("enum"):
        yield "takes any value for"
    elif refused := _extra("enum", theirs, ours):
        yield f"knows no {' or '.join(sorted(refused))} for"
    both = {*(ours.get("properties") or ())} & {*(theirs.get("properties") or ())}
    if both & {*ours.get("required", ())} != both & {*theirs.get("required", ())}:
        yield "wants other fields of"
    if not _agree(ours.get("default"), theirs.get("default")):
        yield "has another default for"


def _pairs(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str) -> Iterator[_Pair]:
    yield path, ours, theirs
    for name, schema in (ours.get("properties") or {}).items():
        there = (theirs.get("properties") or {}).get(name)
        if there is not None:
            yield from _pairs(schema, there, f"{path}.{name}" if path else name)
    for name, suffix in (("items", "[]"), ("additionalProperties", ".*")):
        schema, there = ours.get(name), theirs.get(name)
        if isinstance(schema, Mapping) and isinstance(there, Mapping):
            yield from _pairs(schema, there, path + suffix)


def _extra(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> set[str]:
    """Fields or values that only the second schema has, if both have any."""
    return {*(theirs.get(name) or ())} - {*ours[name]} if ours.get(name) else set()


def _rules(schema: Mapping[str, Any]) -> set[str]:
    return {each["rule"] for each in schema.get(RULES) or ()}


def _agree(ours: Any, theirs: Any) -> bool:
    """Whether two defaults agree. A block's default contains those of its fields, which differ between versions."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return all(_agree(each, theirs[name]) for name, each in ours.items() if name in theirs)
    return bool(ours == theirs)
