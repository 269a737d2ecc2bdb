"""Collecting a step's rollouts: episodes are played, completions scored as they end, groups come back in order.

Belongs here: the meeting of prompts, environment, engine and rewards. Does not belong here: what an environment makes
of a completion (`environments`), how episodes get their tokens (`asking`), how rewards run (`workers`).

Legend: `_P` prompts, `_G` the rollouts of one prompt.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from orbit_runtime.environments.single_turn import SingleTurn
from orbit_runtime.errors import RewardsFailingError, StoppedOnRequest
from orbit_runtime.loop.asking import Asking
from orbit_runtime.loop.publish import Publication
from orbit_runtime.loop.signals import StopFlag
from orbit_runtime.types import Engine, Group, Prompt

STOP_SECONDS = 0.5
"""How often a stop request is looked for while rewards run: they may be slow, a pod's grace period is short."""


@dataclass(frozen=True)
class Collected:
    """A step's groups, prompts in the order they were drawn, and what collecting them took."""

    groups_P: tuple[Group, ...]
    reasons: tuple[str, ...]
    """First reasons of rewards that timed out or crashed."""
    seconds_collect: float
    seconds_score: float


async def collect(
    prompts_P: Sequence[Prompt],
    environment: SingleTurn,
    engine: Engine,
    *,
    step: int,
    policy: Publication,
    stop: StopFlag,
) -> Collected:
    """Plays and scores every episode of `prompts_P` under `policy`.

    Raises:
        StoppedOnRequest: a signal came while sampling or scoring; the step is dropped.
        GateError: a token was sampled under another policy version.
    """
    started = time.monotonic()
    asking = Asking(engine, policy.name, policy.adapter.version)
    episodes = [environment.play(each, asking) for each in environment.build_episodes(prompts_P)]
    is_played = await asking.run(episodes, stop)
    sampled = time.monotonic()
    is_scored = is_played and environment.is_scored(0.0)
    while is_played and not is_scored and not stop:
        is_scored = environment.is_scored(STOP_SECONDS)
    if not is_scored:
        environment.discard()
        doing = "being scored" if is_played else "sampling"
        raise StoppedOnRequest(f"{stop.reason} while step {step} was {doing}: the step is dropped")
    groups, reasons = environment.build_groups(step)
    return Collected(tuple(groups), tuple(reasons), sampled - started, time.monotonic() - sampled)


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
