"""Types shared by a run and the processes of its environments and tools.

Belongs here: records and messages. Does not belong here: processes (`environment_pool`), or what an episode is
(`environments`). Light on purpose: every such process imports it.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_MESSAGE = 1 << 20
"""Maximum bytes of one response of an environment or a tool."""


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's response to a completion.

    Example: `Step("too high, guess again")`, and at the end `Step(reward=1.0, done=True)`
    """

    messages: str | Sequence[Mapping[str, Any]] = ()
    """What the policy reads next: chat messages, or text, which becomes one user message."""
    reward: float = 0.0
    """Reward of this turn; the rollout's is the sum over its turns."""
    done: bool = False
    """Whether the episode is over; `messages` is then ignored."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Numbers to keep with the rollout under their names; later turns override earlier ones."""


@dataclass(frozen=True, slots=True)
class EnvironmentLimits:
    """Limits of one process."""

    start_seconds: float = 120.0
    """Time for importing everything, once."""
    step_seconds: float = 30.0
    """Time for one response of an environment, or one tool call."""
    memory_bytes: int = 1 << 30
    """Memory allocated beyond what importing took."""
    processes: int = 256
    """Maximum processes at a time."""
    may_fork: bool = False
    """Whether it may start processes of its own."""


@dataclass(frozen=True, slots=True)
class EnvironmentTarget:
    """What the processes import.

    Example: `EnvironmentTarget("my_games:Guess", {"highest": 9})`, or `EnvironmentTarget(tools=("my_tools:add",))`
    """

    environment: str | None = None
    """The environment, as `module:Class`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class, for each episode."""
    tools: tuple[str, ...] = ()
    """The tools, each as `module:function`."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call."""

    text: str
    """For the policy to read: the result, or the error."""
    is_error: bool = False


class EnvironmentFailed(Exception):
    """An environment ran out of time, or ended abnormally: its episode is lost, not scored."""

    def __init__(self, outcome: Literal["timeout", "crash"], reason: str, stack: str = "") -> None:
        """Args: stack: stack of its process, if it ran out of time."""
        super().__init__(reason)
        self.stack = stack
        self.outcome: Literal["timeout", "crash"] = outcome
        self.reason = reason


def checked_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Chat messages of what an environment gave; text becomes one user message. Raises TypeError for anything else."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, Sequence):
        raise TypeError(f"{where} gave {type(value).__name__} for messages, which are text or a list")
    for message in value:
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_message or not isinstance(message.get("content"), str | list):
            raise TypeError(f"{where} gave {repr(message)[:80]}, which is no message with 'role' and 'content'")
    return [dict(message) for message in value]


def checked_number(value: Any, what: str) -> float:
    """Raises TypeError for what is no finite number."""
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise TypeError(f"the {what} is {repr(value)[:80]}, and no finite number")
    return float(value)
