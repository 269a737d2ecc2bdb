"""Collecting a step's rollouts: episodes are played, completions scored as they end, groups come back in order.

Belongs here: the meeting of prompts, environment, engine and rewards. Does not belong here: what an environment makes
of a completion (`environments`), how episodes get their tokens (`asking`), how rewards run (`workers`).

Legend: `_P` prompts, `_G` the rollouts of one prompt.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from orbit_runtime.environments.episodes import Environment
from orbit_runtime.errors import RewardsFailingError, StoppedOnRequest
from orbit_runtime.loop.asking import Asking
from orbit_runtime.loop.publish import Publication
from orbit_runtime.loop.signals import StopFlag
from orbit_runtime.types import Engine, Group, Prompt, Rollout


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
    environment: Environment,
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
    episodes = environment.build_episodes(prompts_P, step)
    played = await asking.run([environment.play(each, asking) for each in episodes], stop)
    if played is None:
        doing = "sampling" if asking.is_sampling else "being scored"
        raise StoppedOnRequest(f"{stop.reason} while step {step} was {doing}: the step is dropped")
    ended = time.monotonic()
    sampled = max(started, asking.answered)
    return Collected(
        build_groups(prompts_P, [each.rollout for each in played]),
        tuple(dict.fromkeys(reason for each in played for reason in each.reasons)),
        sampled - started,
        ended - sampled,
    )


def build_groups(prompts_P: Sequence[Prompt], rollouts: Sequence[Rollout]) -> tuple[Group, ...]:
    """Args: rollouts: as many of each prompt, in the prompts' order."""
    size = len(rollouts) // max(1, len(prompts_P))
    return tuple(
        Group(prompt, tuple(rollouts[index * size : (index + 1) * size])) for index, prompt in enumerate(prompts_P)
    )


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
