"""Collecting a step's rollouts: requests to the engine, completions to the rewards as they finish, groups in order.

Belongs here: the meeting of prompts, engine and rewards. Does not belong here: what an environment makes of a
completion (`environments`), how rewards run (`workers`).

Legend: `_P` prompts, `_G` the rollouts of one prompt.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from orbit_runtime.environments.single_turn import SingleTurn
from orbit_runtime.errors import GateError, RewardsFailingError, StoppedOnRequest
from orbit_runtime.loop.signals import StopFlag
from orbit_runtime.types import Completion, Engine, Group, Prompt

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


def collect(
    prompts_P: Sequence[Prompt],
    environment: SingleTurn,
    engine: Engine,
    *,
    step: int,
    adapter: str,
    version: int,
    stop: StopFlag,
) -> Collected:
    """Samples and scores every rollout of `prompts_P` under `adapter`.

    Raises:
        StoppedOnRequest: a signal came while sampling or scoring; the step is dropped.
        GateError: a token was sampled under another policy version.
    """
    started = time.monotonic()
    requests = environment.build_requests(prompts_P, adapter)
    completions: dict[int, Completion] = {}
    for completion in engine.generate(requests):
        if stop:
            environment.discard()
            raise StoppedOnRequest(f"{stop.reason} while step {step} was sampling: the step is dropped")
        if set(completion.versions_T) - {version}:
            raise GateError(
                f"tokens of step {step} carry versions {sorted(set(completion.versions_T))}, not {version}",
                where="collect",
            )
        completions[completion.request_id] = completion
        environment.submit(completion)
    sampled = time.monotonic()
    while not environment.is_scored(STOP_SECONDS):
        if stop:
            environment.discard()
            raise StoppedOnRequest(f"{stop.reason} while step {step} was being scored: the step is dropped")
    groups, reasons = environment.build_groups(step, completions)
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
