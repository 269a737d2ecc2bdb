"""`TrajectoryItem`, reading the parts of an item that may be a plain dict, and checks of values and functions supplied
by users, each with one clear error.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from orbit_runtime.errors import DataError, UsageError
from orbit_runtime.workers.user_code.entrypoints import is_async


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


def check_number(where: str, value: object, *, low: float, high: float = math.inf, above: bool = False) -> None:
    """Checks that `value` is a finite number in `[low, high]`, with `above` in `(low, high]`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{value!r} is not a number", where=where, fix=f"give {_range(low, high, above)}")
    if value > high or value < low or (above and value == low):
        raise UsageError(f"{value!r} is out of range", where=where, fix=f"give {_range(low, high, above)}")


def check_count(where: str, value: object, *, low: int = 1) -> None:
    """Checks that `value` is a whole number, `low` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise UsageError(f"{value!r} is not a whole number of {low} or more", where=where, fix=f"give {low} or more")


def check_items(data: object, where: str) -> list[Any]:
    """`data` as a new list; a text or a mapping, which are iterable too, is refused."""
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        raise DataError(
            f"a {type(data).__name__} is not a collection of items",
            where=where,
            fix="give a list of items, or a dataset",
        )
    return list(data)


def check_sync(function: object, where: str) -> None:
    """Checks for a plain function, as the caller does not await."""
    if not callable(function):
        raise UsageError(f"{function!r} cannot be called", where=where, fix="give a function")
    if is_async(function):
        raise UsageError(
            "this function is async, but a plain one is expected", where=where, fix="write `def` instead of `async def`"
        )


def check_async(function: object, where: str) -> None:
    """Checks for an async function; one that is wrapped to look plain is detected when called (`awaited`)."""
    if not callable(function):
        raise UsageError(f"{function!r} cannot be called", where=where, fix="give an async function")
    if not is_async(function) and (inspect.isfunction(function) or inspect.ismethod(function)):
        raise UsageError(
            "this function is not async, but it is awaited", where=where, fix="write `async def` instead of `def`"
        )


async def awaited(answer: object, where: str) -> Any:
    """The result of a call that must be awaited."""
    if not inspect.isawaitable(answer):
        raise UsageError(
            f"the call returned a {type(answer).__name__}, which cannot be awaited",
            where=where,
            fix="make it an `async def`",
        )
    return await answer


def plain(answer: Any, where: str) -> Any:
    """The result of a call that must not be awaited."""
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise UsageError(
            "the call returned an awaitable, but a value is expected", where=where, fix="write `def`, not `async def`"
        )
    return answer


def num_accepted(function: Callable[..., Any], most: int) -> int:
    """Number of positional arguments that the function takes, at most `most`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return most
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return min(most, len(positional))


def _range(low: float, high: float, above: bool) -> str:
    if math.isinf(high):
        return f"a number above {low:g}" if above else f"a number of {low:g} or more"
    return f"a number above {low:g}, at most {high:g}" if above else f"a number from {low:g} to {high:g}"
