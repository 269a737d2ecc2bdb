"""Defaults that an installation adds to every run, read from its settings.

Belongs here: reading and checking them; their types are the manifest's. Does not belong here: adding them
(`manifests`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from pydantic import ValidationError

from orbit_runtime.errors import UsageError
from orbit_runtime.spec.block import is_label_key, is_label_value
from orbit_runtime.spec.placement import Egress, Placement, Toleration
from orbit_runtime.spec.run import find_contradictions

FIX = "correct `runs` in the chart's values"
RESERVED = re.compile(
    r"([^/]+\.)?orbitrl\.dev/.*|app\.kubernetes\.io/(name|instance|component|part-of|managed-by)"
    r"|batch\.kubernetes\.io/.*|controller-uid|job-name"
)
"""Label keys that we or the Job's controller set on a run's pod: selectors, policies and monitors rely on them."""


def read_node_selector(where: str, text: str) -> Mapping[str, str]:
    return _read_placement(where, "nodeSelector", text).node_selector


def read_tolerations(where: str, text: str) -> tuple[Toleration, ...]:
    return _read_placement(where, "tolerations", text).tolerations


def read_egress(where: str, text: str) -> tuple[Egress, ...]:
    return _read_placement(where, "egress", text).egress


def read_labels(where: str, text: str) -> Mapping[str, str]:
    """Of a run's pod."""
    labels = read_annotations(where, text)
    for key, value in labels.items():
        if not is_label_value(value):
            raise UsageError(f"`{value}` cannot be the value of a label", where=f"{where}: {key}", fix=FIX)
    return labels


def read_annotations(where: str, text: str) -> Mapping[str, str]:
    """Of a run's pod."""
    pairs = _read_json(where, text)
    if not isinstance(pairs, dict) or not all(isinstance(value, str) for value in pairs.values()):
        raise UsageError("a mapping of texts is expected", where=where, fix=f"{FIX}; quote numbers, true and false")
    for key in pairs:
        if not is_label_key(key):
            raise UsageError("this cannot be the key of a label or an annotation", where=f"{where}: {key}", fix=FIX)
        if RESERVED.fullmatch(key):
            raise UsageError("this key is set by Orbit or by Kubernetes", where=f"{where}: {key}", fix=FIX)
    return pairs


READERS: dict[str, Callable[[str, str], Any]] = {
    "run_node_selector": read_node_selector,
    "run_tolerations": read_tolerations,
    "run_egress": read_egress,
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


def _path(parts: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in parts)


def _read_json(where: str, text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"this is not JSON: {error}", where=where, fix=FIX) from None
