"""The nouns between a run and the processes that its environments and tools run in.

Belongs here: records and messages. Does not belong here: processes (`environment_pool`), or what an episode is
(`environments`). Light on purpose: every such process imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_MESSAGE = 1 << 20
"""Bytes that an environment or a tool may answer at once."""


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answers a completion with.

    Example: `Step("too high, guess again")`, and at the end `Step(reward=1.0, done=True)`
    """

    messages: str | Sequence[Mapping[str, Any]] = ()
    """What the policy reads next: chat messages, or text, which becomes one message of the user."""
    reward: float = 0.0
    """Of this turn; the rollout's is the sum over its turns."""
    done: bool = False
    """The episode is over: nothing of `messages` is read."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Numbers to keep with the rollout under their names; the last turn's wins."""


@dataclass(frozen=True, slots=True)
class EnvironmentLimits:
    """What one process may take."""

    start_seconds: float = 120.0
    """Importing everything, once."""
    step_seconds: float = 30.0
    """One answer of an environment, or one call of a tool."""
    memory_bytes: int = 1 << 30
    """That it allocates beyond what importing took."""
    processes: int = 256
    """At the same time."""
    may_fork: bool = False
    """Whether it may start processes of its own."""


@dataclass(frozen=True, slots=True)
class EnvironmentTarget:
    """What the processes import.

    Example: `EnvironmentTarget("my_games:Guess", {"highest": 9})`, or `EnvironmentTarget(tools=("my_tools:add",))`
    """

    environment: str | None = None
    """`module:Class`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class, for each episode."""
    tools: tuple[str, ...] = ()
    """`module:function` of each."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came of a call."""

    text: str
    """For the policy to read: the answer, or what was wrong."""
    is_error: bool = False


class EnvironmentFailed(Exception):
    """An environment ran out of time, or ended in another way than it may: its episode is lost, not scored."""

    def __init__(self, outcome: Literal["timeout", "crash"], reason: str, stack: str = "") -> None:
        """Args: stack: where its process stood, of one that ran out of time."""
        super().__init__(reason)
        self.stack = stack
        self.outcome: Literal["timeout", "crash"] = outcome
        self.reason = reason
