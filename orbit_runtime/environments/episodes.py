"""Episodes and their results: the types that every environment shares.

Belongs here: the rollout of a played episode, and how its rewards add up. Does not belong here: playing (`single_turn`,
`multi_turn`), which step an episode belongs to (`loop`).

Legend: `_P` prompts, `_T` tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from orbit_runtime.environments.trajectory import Trajectory
from orbit_runtime.types import Outcome, Prompt, Rollout, TokenSource
from orbit_runtime.workers.user_code.reward_protocol import RewardResult

FAILED: tuple[Outcome, ...] = ("timeout", "crash")
UNCHOSEN = "tokens_unchosen"
"""Counts, with the first rollout of an episode, the tokens that were sampled for it and train in none of its rollouts.
"""


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode to be played."""

    step: int
    """The step that its rollout trains in."""
    prompt: Prompt
    sample_index: int
    """Of its rollout among those of the prompt; of an episode of several, of the first."""
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
    """A finished, scored episode."""

    rollout: Rollout
    """Its rollout; of an episode of several, the first."""
    reasons: tuple[str, ...] = ()
    """Why rewards, or the environment, timed out or crashed."""
    stopped: Stopped | None = None
    """The first of these timeouts."""
    others: tuple[Rollout, ...] = ()
    """The episode's other rollouts, which an environment that asks the policy itself chose."""

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return (self.rollout, *self.others)


def sampled_tokens(rollout: Rollout) -> int:
    """Tokens that were sampled for it: those that train in it, and, with its episode's first, the unchosen ones."""
    return rollout.loss_mask_T.tobytes().count(1) + round(rollout.counts.get(UNCHOSEN, 0))


class Environment(Protocol):
    """Builds episodes from prompts and plays them, any number at a time, in one event loop."""

    def build_episodes(self, prompts_P: Sequence[Prompt], step: int) -> list[Episode]:
        """Episodes for all samples of each prompt's group, in the prompts' order."""
        ...

    async def play(self, episode: Episode, tokens: TokenSource) -> Played: ...


@dataclass(frozen=True, slots=True)
class Track:
    """What becomes a rollout: tokens, their scores, and what was counted."""

    tokens: Trajectory
    results: Sequence[RewardResult]
    """In the order of the rewards' weights."""
    counts: Mapping[str, float] = field(default_factory=dict)
    cohort: str = ""


def build_played(
    run: str,
    episode: Episode,
    tracks: Sequence[Track],
    weights: Mapping[str, float],
    stopped: Stopped | None = None,
) -> Played:
    """
    Args:
        tracks: one for each rollout of the episode.
        weights: a reward's name to its factor in the sum.
        stopped: evidence of the environment's timeout.
    """
    rollouts = [_build_rollout(run, episode, index, track, weights) for index, track in enumerate(tracks)]
    results = [result for track in tracks for result in track.results]
    reasons = tuple(dict.fromkeys(result.reason for result in results if result.outcome in FAILED))
    if not reasons and any(rollout.outcome in FAILED for rollout in rollouts):
        reasons = ("the weighted sum of the rewards is not finite",)
    late = [
        Stopped(f"reward {name}", each.reason, each.stack)
        for track in tracks
        for name, each in zip(weights, track.results, strict=True)
        if each.outcome == "timeout"
    ]
    return Played(rollouts[0], reasons, stopped or next(iter(late), None), tuple(rollouts[1:]))


def _build_rollout(run: str, episode: Episode, index: int, track: Track, weights: Mapping[str, float]) -> Rollout:
    reward, outcome = combine(track.results, list(weights.values()))
    tokens = track.tokens
    return Rollout(
        run=run,
        step=episode.step,
        prompt_id=episode.prompt.prompt_id,
        sample_index=episode.sample_index + index,
        turns=tuple(tokens.turns),
        token_ids_T=tokens.token_ids_T,
        loss_mask_T=tokens.loss_mask_T,
        logprobs_T=tokens.logprobs_T,
        versions_T=tokens.versions_T,
        reward=reward,
        outcome=outcome,
        reward_parts={name: result.value for name, result in zip(weights, track.results, strict=True)},
        finish_reason=tokens.finish_reason,
        routed_experts=tokens.routed_experts,
        counts=track.counts,
        cohort=track.cohort,
    )


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
