"""`TrajectoryItem`, and reading the parts of an item that may be a plain dict."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from orbit_runtime.errors import DataError


@dataclass(frozen=True)
class TrajectoryItem:
    """One thing that an agent did.

    Example: `TrajectoryItem("12+34=", "46", 1.0, {"model": "tiny-adder"})`
    """

    state: Any
    """The agent's observation: text, messages, numbers."""
    action: Any = ""
    """The agent's response to it."""
    reward: float | None = 0.0
    """The reward of the action; None if unknown."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Anything else that is worth keeping."""

    def __post_init__(self) -> None:
        if self.reward is not None and (isinstance(self.reward, bool) or not isinstance(self.reward, int | float)):
            raise DataError(
                f"{self.reward!r} is not a number", where="TrajectoryItem.reward", fix="give a number or None"
            )
        if not isinstance(self.metadata, dict):
            raise DataError(f"{self.metadata!r} is not a dict", where="TrajectoryItem.metadata", fix="give a dict")


Item = TrajectoryItem | dict[str, Any]
"""Functions of this package accept both items and plain dicts."""

PAIRS = (("state", "action"), ("input", "output"), ("prompt", "completion"))
"""Pairs of keys under which a plain dict may hold state and action."""


def item_from(value: object, where: str) -> TrajectoryItem:
    """An item, or a mapping with an item's fields."""
    if isinstance(value, TrajectoryItem):
        return value
    known = [each.name for each in fields(TrajectoryItem)]
    if not isinstance(value, Mapping) or "state" not in value or any(key not in known for key in value):
        shown = f"with the keys {', '.join(map(repr, value))}" if isinstance(value, Mapping) else ""
        raise DataError(
            f"a {type(value).__name__} {shown}".rstrip() + " is not a trajectory item",
            where=where,
            fix=f"give a TrajectoryItem, or a dict of {', '.join(known)}",
        )
    try:
        return TrajectoryItem(**value)
    except DataError as error:
        raise DataError(error.message, where=f"{where}: {error.where}", fix=error.fix) from None


def score_of(item: object, where: str) -> float | None:
    """An item's reward, or a dict's `score` or else `reward`; None if it is None or NaN."""
    if isinstance(item, TrajectoryItem):
        value: Any = item.reward
    elif isinstance(item, Mapping) and ("score" in item or "reward" in item):
        value = item["score"] if "score" in item else item["reward"]
    else:
        raise DataError("there is no score", where=where, fix="give the item a `reward`, or the dict a `score`")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"the score {value!r} is not a number", where=where, fix="give a number or None")
    return None if math.isnan(value) else float(value)


def pair_keys(item: object, where: str) -> tuple[str, str]:
    """The names under which an item holds state and action."""
    if isinstance(item, TrajectoryItem):
        return PAIRS[0]
    keys = set(item) if isinstance(item, Mapping) else set()
    for pair in PAIRS:
        if all(key in keys for key in pair):
            return pair
    raise DataError(
        "neither state and action, nor input and output, nor prompt and completion",
        where=where,
        fix="give a TrajectoryItem, or a dict with one of these pairs",
    )


def seen_key(item: object, where: str) -> str:
    """The name under which an item holds the state."""
    if isinstance(item, TrajectoryItem):
        return "state"
    keys = set(item) if isinstance(item, Mapping) else set()
    for seen, _ in PAIRS:
        if seen in keys:
            return seen
    raise DataError("no `state`, `input` or `prompt`", where=where, fix="give a TrajectoryItem, or a dict with one")


def get(item: Any, key: str) -> Any:
    return getattr(item, key) if isinstance(item, TrajectoryItem) else item[key]


def changed(item: Any, **values: Any) -> Any:
    """A copy with other values; the item itself is unchanged."""
    return replace(item, **values) if isinstance(item, TrajectoryItem) else {**item, **values}


_NO_TEXT = ("reward", "score", "metadata")


def text_of(item: object, where: str) -> str:
    """The text that identifies an item: state and action, or everything in a dict but scores and metadata."""
    if isinstance(item, str):
        return item
    if isinstance(item, TrajectoryItem):
        parts = [item.state, item.action]
    elif isinstance(item, Mapping):
        parts = [value for key, value in item.items() if key not in _NO_TEXT]
    else:
        raise DataError(
            f"a {type(item).__name__} is not an item", where=where, fix="give trajectory items, plain dicts or texts"
        )
    texts = [part if isinstance(part, str) else json.dumps(part, sort_keys=True, default=repr) for part in parts]
    return "\n".join(texts)
