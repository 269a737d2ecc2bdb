"""Types of scoring, and one call of a reward with a separate outcome for every way it can misbehave.

Belongs here: records, the exception that user code may raise, and what a return value or an exception means. Does not
belong here: processes and time limits (`reward_pool`), or the weighted sum over rewards (`environments.episodes`).
Light on purpose: every worker process imports it.
"""

from __future__ import annotations

import inspect
import math
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

from orbit_runtime.workers.user_code.entrypoints import TargetError, describe, is_async, load_object

RewardOutcome = Literal["value", "wrong", "timeout", "crash"]

MAX_FAILURES_KEPT = 20


class WrongAnswer(Exception):
    """Raised by a reward if the completion is no answer at all. It scores 0.0 and trains, counted as `wrong`."""


@dataclass(frozen=True, slots=True)
class RewardTarget:
    """One reward of a run.

    Example: `RewardTarget("exact", "orbit_runtime.environments.rewards.text:exact_match", {"field": "answer"},
    10.0)`
    """

    name: str
    target: str | Callable[..., Any]
    """`module:function`, run in worker processes; or a callable passed from Python, run in this process."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 10.0
    variables: tuple[str, ...] = ()
    """Variables of the run that its workers get, beside those that all do."""


@dataclass(frozen=True, slots=True)
class RewardCall:
    """One completion to score with one reward."""

    reward: str
    """Name of its `RewardTarget`."""
    completion: str
    prompt: Sequence[Mapping[str, str]]
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The result of one call."""

    outcome: RewardOutcome
    value: float | None
    """Finite for `value`, 0.0 for `wrong`, `None` for `timeout` and `crash`: a failure is never scored as 0."""
    reason: str = ""
    """Why there is no value."""
    seconds: float = 0.0
    stack: str = ""
    """The stack of a reward that timed out."""


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Evidence of a timeout or crash, kept for the report."""

    reward: str
    outcome: RewardOutcome
    reason: str
    completion: str
    """First 200 characters of the completion."""


class RewardScorer(Protocol):
    """Scores completions while others are still being generated."""

    @property
    def failures(self) -> Sequence[RewardFailure]:
        """The first timeouts and crashes, at most twenty."""

    def submit(self, calls: Sequence[RewardCall]) -> Future[list[RewardResult]]:
        """Starts scoring and returns at once; the results come together, in the order of the calls.

        The future raises the error that ended the scorer, and is cancelled by `close`. Callers must not cancel it:
        calls that have begun go on.
        """

    def score(self, calls: Sequence[RewardCall]) -> list[RewardResult]:
        """Submits the calls and waits for the results."""

    def close(self) -> None:
        """Ends every worker. Safe to call twice."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def build_failure(call: RewardCall, result: RewardResult) -> RewardFailure:
    return RewardFailure(call.reward, result.outcome, result.reason, call.completion[:200])


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
    if not is_number(value):
        return RewardResult("crash", None, f"returned {_shown(value)}, which is no number", seconds)
    try:
        number = float(value)
    except Exception as error:  # an integer beyond floats, or a number class of the user's
        return RewardResult("crash", None, describe(error), seconds)
    if not math.isfinite(number):
        return RewardResult("crash", None, f"returned {number}", seconds)
    return RewardResult("value", number, "", seconds)


def is_number(value: Any) -> bool:
    """A number, or NumPy's own truth value, which is none to Python."""
    kind = type(value)
    return isinstance(value, numbers.Real) or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # a broken __repr__ of the user's must not end the worker
        text = "…"
    return f"{type(value).__name__} {text[:80]}"
