"""Types of scoring: a reward, a call of it, and its result.

Belongs here: records and the exception that user code may raise. Does not belong here: processes (`reward_pool`), or
the weighted sum over rewards (`environments.episodes`). Light on purpose: every worker process imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol, Self

RewardOutcome = Literal["value", "wrong", "timeout", "crash"]

MAX_FAILURES_KEPT = 20


class WrongAnswer(Exception):
    """Raised by a reward if the completion is no answer at all. It scores 0.0 and trains, counted as `wrong`."""


@dataclass(frozen=True, slots=True)
class RewardTarget:
    """One reward of a run.

    Example: `RewardTarget("exact", "orbit_runtime.environments.rewards.exact_match:exact_match", {"field": "answer"},
    10.0)`
    """

    name: str
    target: str | Callable[..., Any]
    """`module:function`, run in worker processes; or a callable passed from Python, run in this process."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 10.0


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
    """For a timeout, the stack of the reward."""


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
        ...

    def submit(self, calls: Sequence[RewardCall]) -> Future[list[RewardResult]]:
        """Starts scoring and returns at once; the results come together, in the order of the calls.

        The future raises the error that ended the scorer, and is cancelled by `close`. Callers must not cancel it:
        calls that have begun go on.
        """
        ...

    def score(self, calls: Sequence[RewardCall]) -> list[RewardResult]:
        """Submits the calls and waits for the results."""
        ...

    def close(self) -> None:
        """Ends every worker. Safe to call twice."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def build_failure(call: RewardCall, result: RewardResult) -> RewardFailure:
    return RewardFailure(call.reward, result.outcome, result.reason, call.completion[:200])
