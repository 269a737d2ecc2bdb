"""The loop on one screen: collect → advantages → train → publish → keep.

Belongs here: the order of a step, and when a later one may begin. Does not belong here: the work of any stage.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from orbit_runtime.errors import OrbitError, StoppedOnRequest
from orbit_runtime.loop.advantages import build_batch, describe_training, measure_drift
from orbit_runtime.loop.buffer import EpisodeSnapshot
from orbit_runtime.loop.collect import (
    CollectedStep,
    check_failures,
    check_staleness,
    collect_informative,
    measure_staleness,
    what_is_missing,
    with_stale,
)
from orbit_runtime.loop.collector import Collector
from orbit_runtime.loop.display import show_timeouts
from orbit_runtime.loop.keep import keep_failure, keep_rows, keep_step
from orbit_runtime.loop.measure import add_to_adapter, ending, measure
from orbit_runtime.loop.metrics_row import check_parity, prompt_numbers, step_row, with_checkpoint
from orbit_runtime.loop.parity import check_again, check_first_wake, engine_asleep, step_limits
from orbit_runtime.loop.parts import Parts
from orbit_runtime.loop.state import RunState
from orbit_runtime.types import Prompt
from orbit_runtime.workers.child.signals import StopFlag


def run_steps(parts: Parts, state: RunState, stop: StopFlag) -> str:
    """Runs steps until the last one; returns why it ended: `done`, `exhausted`, `stopped`, or `converged: ` and why.

    A step is finished or dropped, never kept by half: on a stop request the newest finished step is made durable.
    """
    assert state.publication is not None
    overlaps = parts.spec.rollout.max_staleness > 0
    with Collector(
        parts.environment, parts.engine, taken=state.step, restored=state.kept, overlaps=overlaps
    ) as collector:
        state.kept = ()
        collector.switch(state.publication)
        first = state.step
        cursors: dict[int, Mapping[str, Any]] = {first: parts.prompts.state()}
        ended = _run(parts, state, stop, collector, cursors)
        _settle(parts, state)
        kept: Sequence[EpisodeSnapshot] = ()
        if ended == "stopped" and parts.spec.rollout.max_staleness:
            collector.pause()
            kept = collector.keep()
    if state.step > first:
        _keep_newest(parts, state, parts.prompts.with_rates(cursors[state.step]), kept)
    elif kept and state.checkpoint_step:
        parts.checkpoints.restate(state, parts.prompts.with_rates(cursors[state.step]), kept)
    return ended


def _run(
    parts: Parts, state: RunState, stop: StopFlag, collector: Collector, cursors: dict[int, Mapping[str, Any]]
) -> str:
    """Args: cursors: prompt cursor after each step that has begun."""
    training, checkpoint = parts.spec.training, parts.spec.checkpoint
    rounds = parts.spec.algorithm.objective.max_rounds
    while state.step < training.steps:
        assert state.publication is not None
        step = state.step + 1
        collected: CollectedStep | None = None
        try:
            if stop:
                raise StoppedOnRequest(f"{stop.reason} after step {state.step}")
            measure(parts, state, collector, stop)
            if early := ending(parts, state):
                return _end(parts, state, stop, collector, early)
            started = time.monotonic()
            _begin_steps(parts, state, collector, cursors)
            if step not in cursors:
                if parts.prompts.passed_over:
                    parts.show.note("no prompt is left with a pass rate within spec.data.difficulty")
                return _end(parts, state, stop, collector, "exhausted")
            parts.show.stage("collect", step)
            collected = collect_informative(
                _take(parts, collector, step, stop),
                partial(_take_more, parts, collector, step, stop),
                partial(parts.prompts.take, step=step),
                max_rounds=rounds,
                extra=parts.spec.rollout.over_sampling,
            )
            if rounds:
                cursors[step] = parts.prompts.state()
            groups = collected.groups_P
            show_timeouts(parts.show, step, collected)
            check_failures(collected, parts.spec.environment.failure_limit)
            staleness = measure_staleness(groups, state.version)
            check_staleness(staleness, parts.spec.rollout.max_staleness)

            parts.show.stage("train", step)
            training_started = time.monotonic()
            with engine_asleep(parts, state):
                samples_D = build_batch(parts.spec, parts.algorithm, parts.trainer, groups)
                lacking = what_is_missing(groups, samples_D, wanted=training.prompts_per_step, max_rounds=rounds)
                if lacking:
                    parts.show.note(f"step {step}: {lacking}")
                drift = measure_drift(parts.spec, parts.trainer, samples_D)
                if staleness.max:
                    samples_D = with_stale(samples_D, groups, state.version)
                result = parts.trainer.update(samples_D)
            check_parity(result, step_limits(parts, state), enforce=parts.spec.parity.preflight == "Enforce")

            # The previous step was being written until here; this one is kept once that one is durable.
            settling_started = time.monotonic()
            _settle(parts, state)
            parts.show.stage("publish", step)
            publish_started = time.monotonic()
            state.publication = parts.publisher.publish(state.version + 1, state.publication)
            collector.switch(state.publication)
            parts.versions.activate(state.publication)
            state.publishes += 1
            state.publishes_proven += state.publication.is_proven
            check_first_wake(parts, state)
            check_again(parts, state, step)

            keep_started = time.monotonic()
            state.step = step
            parts.prompts.record(step, groups)
            row = step_row(
                state,
                collected,
                prompt_numbers(parts.prompts, cursors[step], groups) | {"kl_base": drift},
                result,
                staleness,
                seconds_train=settling_started - training_started,
                seconds_publish=keep_started - publish_started,
                seconds_total=keep_started - started - (publish_started - settling_started),
            )
            keep_step(
                parts.store,
                parts.execution,
                row,
                collected,
                before=state.row,
                reference_fields=parts.reference_fields,
                trained=describe_training(
                    parts.spec.algorithm.objective, groups, samples_D, result.entropies_T, parts.text_of
                ),
                digests=state.rows,
            )
            _warn_of_changed_code(parts, state)
            cursors.pop(step - 1)
            if step % checkpoint.every_steps == 0 and step < training.steps:
                parts.checkpoints.begin(state, parts.prompts.with_rates(cursors[step]), collector.keep())
            state.row = with_checkpoint(row, time.monotonic() - keep_started)
            if step < training.steps:
                parts.show.step(state.row, state)
        except StoppedOnRequest as request:
            parts.show.note(str(request))
            return "stopped"
        except OrbitError as error:
            keep_failure(parts.store, step, error, collected, collector.unanswered())
            raise
    return _end(parts, state, stop, collector, "done")


def _warn_of_changed_code(parts: Parts, state: RunState) -> None:
    for name in parts.code.changed():
        warning = (
            f"{name} was changed during execution {parts.execution.number}: what has imported it goes on with what it "
            "imported, and a worker that is replaced imports the new file; the next start asks whether to accept it"
        )
        if warning not in state.warnings:
            state.warn(warning)
            parts.show.note(f"warning: {warning}")


def _end(parts: Parts, state: RunState, stop: StopFlag, collector: Collector, ended: str) -> str:
    """Runs the last evaluation, which a stop request may cut short."""
    try:
        measure(parts, state, collector, stop, is_last=True)
    except StoppedOnRequest as request:
        parts.show.note(str(request))
        return "stopped"
    return ended


def _begin_steps(parts: Parts, state: RunState, collector: Collector, cursors: dict[int, Mapping[str, Any]]) -> None:
    """Starts every step that may begin now.

    Step s trains the policy that resulted from s - 1 updates. With `maxStaleness` k it begins once s - 1 - k of them
    are published, so none of its tokens is more than k versions old when it trains: no tokens that were paid for are
    ever dropped for their age.
    """
    training = parts.spec.training
    last = min(training.steps, state.step + 1 + parts.spec.rollout.max_staleness)
    for step in range(max(cursors) + 1, last + 1):
        prompts_P = parts.prompts.take(training.prompts_per_step + parts.spec.rollout.over_sampling, step=step)
        if not prompts_P:
            break
        cursors[step] = parts.prompts.state()
        collector.begin(step, prompts_P, training.prompts_per_step)


def _take(parts: Parts, collector: Collector, step: int, stop: StopFlag) -> CollectedStep:
    """Raises StoppedOnRequest if the run is to stop before the step's rollouts are complete."""
    collected = collector.take(step, stop)
    if collected is None:
        fate = "its rollouts are kept" if parts.spec.rollout.max_staleness else "the step is dropped"
        raise StoppedOnRequest(f"{stop.reason} while step {step} was {collector.doing}: {fate}")
    return collected


def _take_more(
    parts: Parts, collector: Collector, step: int, stop: StopFlag, prompts_P: Sequence[Prompt], wanted: int
) -> CollectedStep:
    collector.begin_again(step, prompts_P, wanted)
    return _take(parts, collector, step, stop)


def _settle(parts: Parts, state: RunState) -> None:
    """Waits until the newest finished step is durable, and adds the time that took to its row."""
    started = time.monotonic()
    parts.show.stage("checkpoint", state.step)
    parts.checkpoints.settle(state)
    add_to_adapter(parts, state)
    parts.show.checkpoint(state)
    if state.row is not None:
        state.row = with_checkpoint(state.row, time.monotonic() - started)


def _keep_newest(parts: Parts, state: RunState, cursor: Mapping[str, Any], kept: Sequence[EpisodeSnapshot]) -> None:
    """Makes the newest finished step durable, however the run ended, and records the base digest again."""
    assert state.row is not None
    state.base_digest_after = parts.side.base_digest()
    if state.checkpoint_step == state.step:
        parts.checkpoints.restate(state, cursor, kept)
    else:
        parts.checkpoints.begin(state, cursor, kept)
        _settle(parts, state)
    keep_rows(parts.store, parts.execution, [state.row], state.rows)
    if state.step == parts.spec.training.steps:
        parts.show.step(state.row, state)
