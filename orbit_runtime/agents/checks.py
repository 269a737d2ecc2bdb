"""Checks of values and functions supplied by users, each with one clear error."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from orbit_runtime.errors import DataError, UsageError
from orbit_runtime.workers.user_code.entrypoints import is_async


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
