"""The rollouts collected for a step, and whether they may be trained on.

Belongs here: groups in the order of their prompts, the limit on failed rewards. Does not belong here: playing episodes
(`collector`), the staleness of their tokens (`staleness`).

Legend: `_P` prompts, `_G` the rollouts of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orbit_runtime.environments.episodes import Played
from orbit_runtime.errors import RewardsFailingError
from orbit_runtime.types import Group, Prompt, Rollout

MAX_STOPPED = 20
"""Stopped episodes kept as evidence for each step: they tend to have stopped in one place."""


@dataclass(frozen=True)
class Evidence:
    """Evidence of one episode that stopped, for debugging."""

    prompt_id: str
    sample_index: int
    stage: str
    reason: str
    stack: str
    turns: tuple[tuple[str, str], ...]
    """Role and text so far."""


@dataclass(frozen=True)
class Collected:
    """A step's groups, with prompts in the order they were drawn, and the cost of collecting them."""

    groups_P: tuple[Group, ...]
    reasons: tuple[str, ...]
    """The first distinct reasons of rewards that timed out or crashed."""
    seconds_collect: float
    """Seconds the loop waited for tokens."""
    seconds_score: float
    """Seconds the loop then waited for rewards, after the last token."""
    waiting: int = 0
    """Rollouts of later steps that had already ended."""
    unfinished: int = 0
    """Rollouts of later steps that had begun but not ended."""
    prompts_cancelled: int = 0
    """Prompts that the step dropped because enough others had ended."""
    tokens_cancelled: int = 0
    """Tokens that had been sampled for the dropped prompts."""
    stopped: tuple[Evidence, ...] = ()
    """Evidence of episodes whose environment or reward gave no result in the time allowed."""


def build_groups(prompts_P: Sequence[Prompt], rollouts: Sequence[Rollout]) -> tuple[Group, ...]:
    """Args: rollouts: in the prompts' order, the same number for each prompt."""
    size = len(rollouts) // max(1, len(prompts_P))
    return tuple(
        Group(prompt, tuple(rollouts[index * size : (index + 1) * size])) for index, prompt in enumerate(prompts_P)
    )


def gather_stopped(played: Sequence[Played]) -> tuple[Evidence, ...]:
    """Evidence of the first `MAX_STOPPED` episodes of a step that stopped."""
    stopped = [(each.rollout, each.stopped) for each in played if each.stopped is not None]
    return tuple(
        Evidence(
            rollout.prompt_id, rollout.sample_index, found.stage, found.reason, found.stack,
            tuple((turn.role, turn.text) for turn in rollout.turns),
        )
        for rollout, found in stopped[:MAX_STOPPED]
    )  # fmt: skip


def check_failures(collected: Collected, limit: float) -> None:
    """Raises RewardsFailingError (86) if the share of failed rewards exceeds `limit`."""
    rollouts = [rollout for group in collected.groups_P for rollout in group.rollouts_G]
    timeouts, crashes = (sum(each.outcome == outcome for each in rollouts) for outcome in ("timeout", "crash"))
    if timeouts + crashes > limit * len(rollouts):
        longer = ", or raise timeoutSeconds (of a reward) or limits.stepSeconds (of an environment)" if timeouts else ""
        raise RewardsFailingError(
            f"{timeouts + crashes} of {len(rollouts)} rollouts of this step have no reward "
            f"({crashes} crashed, {timeouts} timed out), the limit is {limit:.0%}: " + "; ".join(collected.reasons[:3]),
            where="spec.environment.failureLimit",
            fix=f"correct what the reasons name{longer}; the rollouts are kept in failures/",
        )
