"""What environments of several turns share: an episode's limits, and its messages as text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from orbit_runtime.types import FinishReason, Prompt, Sampling
from orbit_runtime.workers.user_code.reward_protocol import RewardCall

OWN_PART = "environment"
"""Name of the environment's own reward among the parts of a reward."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of one episode; the first one reached ends it, and it is scored as it is."""

    turns: int = 8
    """Completions of the policy; of an episode with branches, those along one branch."""
    tokens: int | None = None
    """Tokens that the policy samples, also along one branch; None: as many as the model's context allows."""
    context: int = 4096
    """Maximum sequence length of the model."""
    seconds: float = 3600.0
    """Limit on the time since its environment has a process. Checked between turns: a turn in progress is finished."""


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """Settings that all episodes of a run share."""

    run: str
    sampling: Sampling
    limits: EpisodeLimits
    group_size: int
    seed: int
    gives_reward: bool
    """Whether the environment's own rewards count, as the part `environment`."""
    clock: Callable[[], float] = time.monotonic
    """Seconds from any origin."""

    def room(self, length: int, sampled: int) -> int:
        """Tokens that the next completion may have. Args: length: tokens so far; sampled: the policy's among them."""
        room = min(self.sampling.max_new_tokens, self.limits.context - length)
        return room if self.limits.tokens is None else min(room, self.limits.tokens - sampled)

    def limit_reached(self, room: int, turns: int, seconds: float) -> FinishReason | None:
        """Why an episode of so many turns must end before its next one; None if it need not."""
        if room < 1 or turns >= self.limits.turns:
            return "length"
        return "deadline" if seconds >= self.limits.seconds else None


def build_calls(names: Iterable[str], prompt: Prompt, messages: Sequence[Mapping[str, Any]]) -> list[RewardCall]:
    """The manifest's rewards see the last message of the policy as completion, and everything before as prompt."""
    is_answered = bool(messages) and messages[-1]["role"] == "assistant"
    completion = _content(messages[-1]) if is_answered else ""
    before = messages[:-1] if is_answered else messages
    return [RewardCall(name, completion, before, prompt.fields) for name in names]


def given_turns(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Role and text of messages that the policy reads together: a system message is a turn, the others are one."""
    runs = [[*run] for _, run in groupby(messages, lambda each: each["role"] == "system")]
    return [(str(run[-1]["role"]), "\n".join(map(_content, run))) for run in runs] or [("user", "")]


def _content(message: Mapping[str, Any]) -> str:
    """The text of a message; of a list of parts, the text parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part["text"]) for part in content if part.get("type") == "text")
