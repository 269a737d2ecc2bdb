"""The synchronous loop, one screen: collect → advantages → train → publish → keep.

Belongs here: the order of a step. Does not belong here: anything a stage does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from orbit_runtime.errors import OrbitError, StoppedOnRequest
from orbit_runtime.loop.advantages import build_batch
from orbit_runtime.loop.build import Parts
from orbit_runtime.loop.collect import check_failures, collect
from orbit_runtime.loop.keep import keep_failure, keep_row, keep_step
from orbit_runtime.loop.parity import check_again, step_limits
from orbit_runtime.loop.row import check_parity, step_row, with_checkpoint
from orbit_runtime.loop.signals import StopFlag
from orbit_runtime.loop.sleep import check_first_wake, engine_asleep
from orbit_runtime.loop.state import RunState
from orbit_runtime.types import Group


def run_sync(parts: Parts, state: RunState, stop: StopFlag) -> str:
    """Runs steps until the last one; returns why it ended: `done`, `exhausted` or `stopped`.

    A step is finished or dropped, never half kept: on a stop request the newest finished step is made durable.
    """
    training, checkpoint = parts.spec.training, parts.spec.checkpoint
    cursor = parts.prompts.state()
    ended, first = "done", state.step
    while state.step < training.steps:
        assert state.publication is not None
        started = time.monotonic()
        step = state.step + 1
        groups: tuple[Group, ...] = ()
        try:
            if stop:
                raise StoppedOnRequest(f"{stop.reason} after step {state.step}")
            prompts_P = parts.prompts.take(training.prompts_per_step)
            if not prompts_P:
                ended = "exhausted"
                break
            parts.show.stage("collect", step)
            with parts.versions.using() as policy:
                collected = asyncio.run(
                    collect(prompts_P, parts.environment, parts.engine, step=step, policy=policy, stop=stop)
                )
            groups = collected.groups_P
            check_failures(collected, parts.spec.environment.failure_limit)

            parts.show.stage("train", step)
            training_started = time.monotonic()
            with engine_asleep(parts, state):
                samples_D = build_batch(parts.spec, parts.algorithm, parts.trainer, groups)
                result = parts.trainer.update(samples_D)
            check_parity(result, step_limits(parts, state), enforce=parts.spec.parity.preflight == "Enforce")

            # The step before was written beside this one so far; this one is kept once that one is durable.
            settling_started = time.monotonic()
            _settle(parts, state)
            parts.show.stage("publish", step)
            publish_started = time.monotonic()
            state.publication = parts.publisher.publish(state.version + 1, state.publication)
            parts.versions.activate(state.publication)
            state.publishes += 1
            state.publishes_proven += state.publication.is_proven
            check_first_wake(parts, state)
            check_again(parts, state, step)

            keep_started = time.monotonic()
            state.step, cursor = step, parts.prompts.state()
            row = step_row(
                state,
                collected,
                result,
                seconds_train=settling_started - training_started,
                seconds_publish=keep_started - publish_started,
                seconds_total=keep_started - started - (publish_started - settling_started),
            )
            keep_step(
                parts.store,
                parts.execution,
                row,
                groups,
                before=state.row,
                reference_fields=parts.reference_fields,
            )
            if step % checkpoint.every_steps == 0 and step < training.steps:
                parts.checkpoints.begin(state, cursor)
            state.row = with_checkpoint(row, time.monotonic() - keep_started)
            if step < training.steps:
                parts.show.step(state.row, state)
        except StoppedOnRequest as request:
            parts.show.note(str(request))
            ended = "stopped"
            break
        except OrbitError as error:
            keep_failure(parts.store, step, error, groups)
            raise
    _settle(parts, state)
    if state.step > first:
        _keep_newest(parts, state, cursor)
    return ended


def _settle(parts: Parts, state: RunState) -> None:
    """Waits until the newest finished step is durable; its row says what that took of the loop's time."""
    started = time.monotonic()
    parts.show.stage("checkpoint", state.step)
    parts.checkpoints.settle(state)
    parts.show.checkpoint(state)
    if state.row is not None:
        state.row = with_checkpoint(state.row, time.monotonic() - started)


def _keep_newest(parts: Parts, state: RunState, cursor: Mapping[str, Any]) -> None:
    """However it ended, the newest finished step is durable, and says that the base is still the one it started on."""
    assert state.row is not None
    state.base_digest_after = parts.side.base_digest()
    if state.checkpoint_step == state.step:
        parts.checkpoints.restate(state, cursor)
    else:
        parts.checkpoints.begin(state, cursor)
        _settle(parts, state)
    keep_row(parts.store, parts.execution, state.row)
    if state.step == parts.spec.training.steps:
        parts.show.step(state.row, state)
