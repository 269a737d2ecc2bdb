"""Loads a reward function and calls it once, telling apart every way it can misbehave.

Belongs here: what a return value or an exception means. Does not belong here: timeouts, which only another process can
enforce.
"""

from __future__ import annotations

import inspect
import math
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orbit_runtime.workers.entrypoints import TargetError, describe, is_async, load_object
from orbit_runtime.workers.reward_protocol import RewardResult, WrongAnswer


def load_target(target: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """The function that `module:function` names, checked to take its arguments. Raises the errors of `load_object`."""
    function = load_object(target)
    check_callable(function, target, arguments)
    return function  # type: ignore[no-any-return]


def check_callable(function: Any, target: str, arguments: Mapping[str, Any]) -> None:
    """Raises `TargetError` unless `function(completion, prompt, fields, **arguments)` can be called."""
    if not callable(function):
        raise TargetError(f"{target!r} is not a function but {type(function).__name__}")
    if is_async(function):
        raise TargetError(f"{target!r} is async; a reward is a plain function, and workers run many at once")
    if inspect.isgeneratorfunction(function):
        raise TargetError(f"{target!r} yields; a reward returns one number")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # built in C without a signature: the first call will tell
    try:
        signature.bind("", [], {}, **arguments)
    except TypeError as error:
        named = "".join(f", {name}={value!r}" for name, value in arguments.items())
        raise TargetError(f"{target!r} cannot be called as (completion, prompt, fields{named}): {error}") from error


def call_reward(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    completion: str,
    prompt: Sequence[Mapping[str, str]],
    fields: Mapping[str, Any],
) -> RewardResult:
    """Calls the reward and maps the result to an outcome; exceptions of user code do not propagate."""
    start = time.perf_counter()
    try:
        value = function(completion, prompt, fields, **arguments)
    except WrongAnswer as verdict:
        return RewardResult("wrong", 0.0, str(verdict), time.perf_counter() - start)
    except BaseException as error:  # SystemExit and KeyboardInterrupt of user code are crashes of that call, too
        return RewardResult("crash", None, describe(error), time.perf_counter() - start)
    return _build_result(value, time.perf_counter() - start)


def _build_result(value: Any, seconds: float) -> RewardResult:
    """Booleans count as 1.0 and 0.0; `None` is `wrong`; anything else that is not a finite real number is a crash."""
    if value is None:
        return RewardResult("wrong", 0.0, "returned None", seconds)
    if not isinstance(value, numbers.Real):
        return RewardResult("crash", None, f"returned {_shown(value)}, which is no number", seconds)
    try:
        number = float(value)
    except Exception as error:  # an integer beyond floats, or a number class of the user's
        return RewardResult("crash", None, describe(error), seconds)
    if not math.isfinite(number):
        return RewardResult("crash", None, f"returned {number}", seconds)
    return RewardResult("value", number, "", seconds)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # a broken __repr__ of the user's must not end the worker
        text = "…"
    return f"{type(value).__name__} {text[:80]}"
