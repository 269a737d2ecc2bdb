"""Is the installed CRD at least as new as this operator? An older one drops fields without a word.

Belongs here: comparing with the schema that the API server publishes. Does not belong here: installing (the chart).
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


async def wait_for_crd(api: Api, stopping: asyncio.Event) -> None:
    """Until the API server serves OrbitRuns: what is not there at the start would never be watched."""
    said = False
    while not stopping.is_set():
        try:
            await api.call("GET", OPENAPI, f"/apis/{GROUP}/{VERSION}")
        except ApiError as error:
            if not said:
                _log.warning("waiting for the CRD orbitruns.%s: %s", GROUP, error)
                said = True
            await asyncio.sleep(1.0)
        else:
            return


async def find_crd_problem(api: Api) -> tuple[str, tuple[str, ...]] | None:
    """What the CRD lacks, in one line and as paths; both empty when it lacks nothing, `None` when nobody answers."""
    try:
        document = await api.call("GET", OPENAPI, f"/openapi/v3/apis/{GROUP}/{VERSION}")
    except ApiError as error:
        if error.status == 404:
            return f"the CRD orbitruns.{GROUP} is not installed; apply crds/ or set crds.install in the chart", ()
        return None
    served = find_served(document)
    missing = () if served is None else tuple(missing_fields(build_schema(), served))
    if not missing:
        return "", ()
    listed = ", ".join(missing[:5]) + (" …" if len(missing) > 5 else "")
    return f"the installed CRD is older than the operator and lacks {listed}; apply crds/ of this version", missing


def drop_fields(status: Mapping[str, Any], missing: Iterable[str]) -> dict[str, Any]:
    """A status without what the CRD lacks: the API server refuses to apply a field that it does not know."""
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
    """Paths of fields of ours that the served schema does not have."""
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
