"""Episodes and their results: the types that every environment shares.

Belongs here: the rollout of a played episode, and how its rewards add up. Does not belong here: playing (`single_turn`,
`multi_turn`), which step an episode belongs to (`loop`).

Legend: `_P` prompts, `_T` tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from orbit_runtime.environments.trajectory import Trajectory
from orbit_runtime.types import Outcome, Prompt, Rollout, TokenSource
from orbit_runtime.workers.reward_protocol import RewardResult

FAILED: tuple[Outcome, ...] = ("timeout", "crash")


@dataclass(frozen=True, slots=True)
class Episode:
    """One rollout to be played."""

    step: int
    """The step that its rollout trains in."""
    prompt: Prompt
    sample_index: int
    prompt_ids_T: tuple[int, ...]
    """Empty if the environment provides the first message."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Evidence of an episode that gave no result within its stage's time limit, set so that slow code still answers."""

    stage: str
    """`environment`, or `reward` and its name."""
    reason: str
    stack: str
    """Stack of its process before it was ended; empty if it could not report one."""


@dataclass(frozen=True, slots=True)
class Played:
    """A finished, scored rollout."""

    rollout: Rollout
    reasons: tuple[str, ...] = ()
    """Why rewards, or the environment, timed out or crashed."""
    stopped: Stopped | None = None
    """The first of these timeouts."""


class Environment(Protocol):
    """Builds episodes from prompts and plays them, any number at a time, in one event loop."""

    def build_episodes(self, prompts_P: Sequence[Prompt], step: int) -> list[Episode]:
        """One episode for each sample of each prompt's group, in the prompts' order."""
        ...

    async def play(self, episode: Episode, tokens: TokenSource) -> Played: ...


def build_played(
    run: str,
    episode: Episode,
    track: Trajectory,
    results: Sequence[RewardResult],
    weights: Mapping[str, float],
    counts: Mapping[str, float] | None = None,
    stopped: Stopped | None = None,
) -> Played:
    """
    Args:
        results, weights: in the same order; `weights` maps a reward's name to its factor in the sum.
        stopped: evidence of the environment's timeout.
    """
    reward, outcome = combine(results, list(weights.values()))
    rollout = Rollout(
        run=run,
        step=episode.step,
        prompt_id=episode.prompt.prompt_id,
        sample_index=episode.sample_index,
        turns=tuple(track.turns),
        token_ids_T=track.token_ids_T,
        loss_mask_T=track.loss_mask_T,
        logprobs_T=track.logprobs_T,
        versions_T=track.versions_T,
        reward=reward,
        outcome=outcome,
        reward_parts={name: result.value for name, result in zip(weights, results, strict=True)},
        finish_reason=track.finish_reason,
        routed_experts=track.routed_experts,
        counts=counts or {},
    )
    reasons = tuple(dict.fromkeys(result.reason for result in results if result.outcome in FAILED))
    if outcome in FAILED and not reasons:
        reasons = ("the weighted sum of the rewards is not finite",)
    late = [
        Stopped(f"reward {name}", each.reason, each.stack)
        for name, each in zip(weights, results, strict=True)
        if each.outcome == "timeout"
    ]
    return Played(rollout, reasons, stopped or next(iter(late), None))


def combine(results: Sequence[RewardResult], weights: Sequence[float]) -> tuple[float | None, Outcome]:
    """Weighted sum of a rollout's rewards. One failed part fails it; one wrong part makes it wrong, but it trains.

    A sum that overflows is a crash, like an infinite reward.

    Example: values 1.0 and 0.5 with weights 1.0 and 0.2 give `(1.1, "value")`.
    """
    outcomes = [result.outcome for result in results]
    for failed in FAILED:
        if failed in outcomes:
            return None, failed
    total = sum(weight * (result.value or 0.0) for result, weight in zip(results, weights, strict=True))
    if not math.isfinite(total):
        return None, "crash"
    return total, "wrong" if "wrong" in outcomes else "value"
