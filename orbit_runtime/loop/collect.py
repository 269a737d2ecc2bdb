"""What was collected for a step, and whether it may train.

Belongs here: groups in the prompts' order, too many failed rewards. Does not belong here: playing episodes
(`collector`), how old their tokens are (`staleness`).

Legend: `_P` prompts, `_G` the rollouts of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orbit_runtime.environments.episodes import Played
from orbit_runtime.errors import RewardsFailingError
from orbit_runtime.types import Group, Prompt, Rollout

MAX_STOPPED = 20
"""Of a step that are kept: they tend to stand in one place."""


@dataclass(frozen=True)
class Evidence:
    """Of one episode that stopped, to be looked into."""

    prompt_id: str
    sample_index: int
    stage: str
    reason: str
    stack: str
    turns: tuple[tuple[str, str], ...]
    """Role and text so far."""


@dataclass(frozen=True)
class Collected:
    """A step's groups, prompts in the order they were drawn, and what collecting them took."""

    groups_P: tuple[Group, ...]
    reasons: tuple[str, ...]
    """First reasons of rewards that timed out or crashed."""
    seconds_collect: float
    """That the loop waited for tokens."""
    seconds_score: float
    """That it waited for rewards, behind the last token."""
    waiting: int = 0
    """Rollouts of later steps that had ended by then."""
    unfinished: int = 0
    """Those that had begun, and not ended."""
    prompts_cancelled: int = 0
    """Prompts that the step went on without, as enough others had ended."""
    tokens_cancelled: int = 0
    """That had been sampled for these."""
    stopped: tuple[Evidence, ...] = ()
    """Of episodes whose environment or reward gave nothing for as long as it may take."""


def build_groups(prompts_P: Sequence[Prompt], rollouts: Sequence[Rollout]) -> tuple[Group, ...]:
    """Args: rollouts: as many of each prompt, in the prompts' order."""
    size = len(rollouts) // max(1, len(prompts_P))
    return tuple(
        Group(prompt, tuple(rollouts[index * size : (index + 1) * size])) for index, prompt in enumerate(prompts_P)
    )


def gather_stopped(played: Sequence[Played]) -> tuple[Evidence, ...]:
    """The first of a step."""
    stopped = [(each.rollout, each.stopped) for each in played if each.stopped is not None]
    return tuple(
        Evidence(
            rollout.prompt_id, rollout.sample_index, found.stage, found.reason, found.stack,
            tuple((turn.role, turn.text) for turn in rollout.turns),
        )
        for rollout, found in stopped[:MAX_STOPPED]
    )  # fmt: skip


def check_failures(collected: Collected, limit: float) -> None:
    """Raises RewardsFailingError (86) where the share of failed rewards is above `limit`."""
    rollouts = [rollout for group in collected.groups_P for rollout in group.rollouts_G]
    failed = sum(1 for rollout in rollouts if rollout.outcome in ("timeout", "crash"))
    if failed > limit * len(rollouts):
        raise RewardsFailingError(
            f"{failed} of {len(rollouts)} rewards of this step failed, the limit is {limit:.0%}: "
            + "; ".join(collected.reasons[:3]),
            where="spec.environment.failureLimit",
            fix="mend the reward; a timeout is raised with timeoutSeconds; the rollouts are kept in failures/",
        )
