"""Evaluations within a run: the same held-out prompts before, during and after training.

Belongs here: when an evaluation is due, asking while training episodes run, what is kept of it, and whether it ends the
run. Does not belong here: playing and scoring (`evaluation`), models outside a run (`evaluate`).

`evaluation/step-000010/` is the folder (`evaluation.journal`) of one policy's evaluation. Its `summary.json`, written
last, makes it complete. The samples then leave memory, which might not hold all evaluations of a run.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from orbit_runtime.checkpoints.adapter_folder import ADAPTERS, EVALUATION, INTERVAL
from orbit_runtime.data.prompts import check_lengths
from orbit_runtime.errors import StoppedOnRequest
from orbit_runtime.evaluation.evaluate import ask_one
from orbit_runtime.evaluation.journal import Journal, read_settings, save_settings
from orbit_runtime.evaluation.records import Usage
from orbit_runtime.evaluation.scores import paired
from orbit_runtime.evaluation.summary import Prices, Score, build_summary
from orbit_runtime.evaluation.tasks import (
    EvalTask,
    evaluation_settings,
    naming_fields,
    open_task,
    task_specs,
    with_sampling,
)
from orbit_runtime.loop.collector import Collector
from orbit_runtime.loop.keep import keep_rows, step_name
from orbit_runtime.loop.multiplexer import RequestMultiplexer
from orbit_runtime.loop.parts import HeldOut, Parts, RunParts
from orbit_runtime.loop.state import RunState
from orbit_runtime.observability.metrics import MetricsRow, Value, build_row, evaluation_field, parse_row
from orbit_runtime.observability.run_folder import find_best, find_stop, read_own_evaluations
from orbit_runtime.planner.support.manifests import check_engine, sampling_of
from orbit_runtime.sides.inputs import Inputs
from orbit_runtime.spec import OrbitRun
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.storage import NotFound, Store, read_manifest, restate_bundle
from orbit_runtime.types import Completion, Sampling, Tokenizer
from orbit_runtime.workers.child.signals import StopFlag

SUMMARY = "summary.json"


@dataclass
class CountedTokenSource:
    """Token source of one episode that counts its usage."""

    asking: RequestMultiplexer
    _usage: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Usage.__dataclass_fields__, 0))

    @property
    def usage(self) -> Usage:
        return Usage(**self._usage)

    async def sample(self, prompt_ids_T: Sequence[int], sampling: Sampling, *, key: int) -> Completion:
        completion = await self.asking.ask(tuple(prompt_ids_T), sampling, key, None)
        self._usage["requests"] += 1
        self._usage["prompt_tokens"] += len(prompt_ids_T)
        self._usage["completion_tokens"] += len(completion.token_ids_T)
        return completion


@dataclass(frozen=True)
class _RunsPolicy:
    """A `Subject`: the run's current policy."""

    name: str
    tokenizer: Tokenizer
    adapter: str
    asks: RequestMultiplexer

    def to_json(self) -> dict[str, Any]:
        return {"kind": "policy", "adapter": self.adapter}

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[Callable[[], CountedTokenSource]]:
        yield lambda: CountedTokenSource(self.asks)


def open_held_out(
    run: OrbitRun, inputs: Inputs, rewards: Mapping[str, Callable[..., Any]] | None, closing: ExitStack
) -> tuple[EvalTask, ...]:
    """The held-out tasks, opened without torch; none if `spec.evaluation.everySteps` is not set.

    Args:
        run: has absolute paths.

    Raises:
        OrbitError: prompts, rewards or environment are unusable; names their field.
    """
    spec, tasks = run.spec, []
    if spec.evaluation.every_steps is None:
        return ()
    for name, each in task_specs(run.name, spec).items():
        with naming_fields(spec, name):
            tasks.append(
                open_task(
                    name,
                    each,
                    evaluation_settings(spec),
                    inputs.folders,
                    closing,
                    rewards=rewards or {},
                    patience=inputs.patience,
                )
            )
    return tuple(tasks)


def check_held_out_sampling(run: OrbitRun) -> None:
    """Raises UnsupportedError (78) if the engine does not support the sampling of the run's evaluations."""
    if run.spec.evaluation.every_steps is not None:
        for each in task_specs(run.name, run.spec).values():
            check_engine(with_sampling(each, evaluation_settings(run.spec)))


def build_held_out(spec: RunSpec, tasks: Sequence[EvalTask], tokenizer: Tokenizer) -> HeldOut | None:
    """The run's evaluations; None if there are no tasks. Raises DataError if a prompt leaves no room for an answer."""
    # Its own `maxNewTokens` may have been decided since they were opened.
    sampling = sampling_of(with_sampling(spec, evaluation_settings(spec)).rollout)
    check_held_out_lengths(spec, tasks, tokenizer, sampling.max_new_tokens)
    return HeldOut(tuple(replace(each, sampling=sampling) for each in tasks), tokenizer) if tasks else None


def check_held_out_lengths(spec: RunSpec, tasks: Sequence[EvalTask], tokenizer: Tokenizer, new_tokens: int = 1) -> int:
    """The longest prompt of the run's evaluations, in tokens. Raises DataError for one that leaves no room for so many
    new tokens."""
    longest = 0
    for task in tasks:
        encode = partial(tokenizer.encode_many, tools=task.pool.tools if task.pool else ())
        room = spec.model.max_sequence_length - new_tokens
        with naming_fields(spec, task.name):
            longest = max(longest, check_lengths(task.table, encode, max_prompt_tokens=room))
    return longest


def measure(parts: Parts, state: RunState, collector: Collector, stop: StopFlag, *, is_last: bool = False) -> None:
    """Evaluates the current policy, if an evaluation is due after the newest step and is not done yet.

    It samples alongside the requests of training, with random draws of its own, so training is not affected.

    Raises:
        StoppedOnRequest: a stop came before all completions did; those that arrived are kept.
        OrbitError: the error that ended the engine or the store.
    """
    every, held_out = parts.spec.evaluation.every_steps, parts.held_out
    if held_out is None or every is None or not (is_last or state.step % every == 0):
        return
    assert state.publication is not None
    found = read_evaluation(parts.store, state.step)
    # An execution that was killed may have evaluated another adapter of this step, or asked something else.
    asked = (state.publication.adapter.digest, json.loads(json.dumps(held_out.settings())))
    if found is None or (found.get("adapter_digest"), found.get("settings")) != asked:
        parts.show.stage("evaluate", state.step)
        found = _ask(parts, state, collector, stop, held_out)
        parts.show.note(_sentence(found), **{"evaluated_step": state.step})
    _tell(parts, state, found)
    state.evaluated = found


def add_to_adapter(parts: Parts, state: RunState) -> None:
    """Writes the newest scores into the manifest of their adapter, which carries them wherever it is copied, and tells
    which adapter is the best now. The adapter must be durable."""
    found, state.evaluated = state.evaluated, None
    if found is None:
        return
    assert state.publication is not None
    prefix = f"{ADAPTERS}{state.publication.name}/"
    facts = read_manifest(parts.store, prefix).facts
    scores = {score["environment"]: {each: score["average"][each] for each in INTERVAL} for score in found["scores"]}
    if facts.get(EVALUATION) != scores:
        restate_bundle(parts.store, parts.execution, prefix, {**facts, EVALUATION: scores})
    if best := find_best(parts.store, state.step):
        parts.show.status.update(best=asdict(best[0]))


def ending(parts: RunParts, state: RunState) -> str | None:
    """`converged: ` and why, if `training.stopWhen` ends the run after the newest step; None if it goes on.

    A resumed run is asked before its first step, so that one that has ended trains no further.
    """
    asked, validation = parts.spec.training.stop_when, parts.spec.data.validation
    is_sft = parts.spec.algorithm.type == "SFT"
    every = (validation.every_steps if is_sft and validation else parts.spec.evaluation.every_steps) or 1
    if asked is None or (state.row is not None and state.step % every):
        return None
    evaluations = {} if is_sft else read_own_evaluations(parts.store)
    losses = asdict(state.validated) if is_sft else {}
    why = find_stop(asked.model_dump(by_alias=True, exclude_none=True), every, evaluations, losses, state.step)
    if why:
        parts.show.note(f"ended early: {why}")
    return why and f"converged: {why}"


def _folder(step: int) -> str:
    return f"evaluation/{step_name(step)}/"


def read_evaluation(store: Store, step: int) -> dict[str, Any] | None:
    """The summary of the evaluation after a step; None if it is not complete."""
    try:
        return dict(json.loads(store.get(f"{_folder(step)}{SUMMARY}")))
    except (NotFound, ValueError):
        return None


def _ask(
    parts: Parts, state: RunState, collector: Collector, stop: StopFlag, held_out: HeldOut
) -> dict[str, Any]:  # fmt: skip
    assert state.publication is not None
    started, folder, evaluation = time.monotonic(), _folder(state.step), parts.spec.evaluation
    settings, name = held_out.settings(), f"step-{state.step}"
    subject = {"kind": "policy", "adapter": state.publication.adapter.digest}
    parts.execution.check()
    before = read_settings(parts.store, folder)
    if before is not None and before != json.loads(json.dumps({"settings": settings, "subjects": {name: subject}})):
        parts.show.note(f"the evaluation after step {state.step} starts over: its settings have changed")
        parts.store.delete(parts.store.list(folder))
    save_settings(parts.store, settings, {name: subject}, folder)
    with Journal(parts.store, parts.execution, folder) as journal:

        async def work(asking: RequestMultiplexer) -> None:
            policy = _RunsPolicy(name, held_out.tokenizer, subject["adapter"], asking)
            show = lambda _name, _done, _total: parts.show.status.beat()  # noqa: E731
            await ask_one(policy, held_out.tasks, journal, concurrency=evaluation.concurrency, show=show)

        if not collector.play(work, stop):
            raise StoppedOnRequest(
                f"{stop.reason} while the policy of step {state.step} was evaluated: {len(journal.samples)} of its "
                "samples are kept"
            )
        journal.gather()
        prices = Prices(evaluation.prompt_price, evaluation.completion_price)
        scores = build_summary(journal.samples, pass_at=evaluation.pass_at, prices=prices).scores
    found = {
        "step": state.step,
        "policy_version": state.version,
        "adapter_digest": subject["adapter"],
        "seconds": time.monotonic() - started,
        "settings": settings,
        "scores": [{**score.to_json(), "means": dict(score.means)} for score in scores],
        "change": _changes(read_evaluation(parts.store, 0), settings, scores) if state.step else {},
    }
    parts.execution.check()
    parts.store.put(f"{folder}{SUMMARY}", json.dumps(found, indent=1).encode())
    return found


def _changes(first: Mapping[str, Any] | None, settings: Mapping[str, Any], scores: Sequence[Score]) -> dict[str, Any]:
    """Environment → this policy minus the first one, paired by prompt, if both were asked with the same settings."""
    if first is None:
        return {}
    asked = json.loads(json.dumps(settings))
    means = {score["environment"]: score["means"] for score in first["scores"]}
    return {
        score.environment: paired(means[score.environment], score.means).to_json()
        for score in scores
        if score.environment in means and first["settings"][score.environment] == asked[score.environment]
    }


def _tell(parts: Parts, state: RunState, found: Mapping[str, Any]) -> None:
    """Adds the scores to the metrics and to the step's row, which is already stored."""
    fields = evaluation_fields(found)
    parts.show.evaluation(build_row(step=state.step, **fields))
    row = state.row if state.row is not None else _stored_row(parts, state.step)
    if row is not None and any(row.get(name) != value for name, value in fields.items()):
        row = build_row(**{**row, **fields})
        keep_rows(parts.store, parts.execution, [row], state.rows)
    if state.row is not None:
        state.row = row


def _stored_row(parts: Parts, step: int) -> MetricsRow | None:
    """The row of a step that an earlier execution trained."""
    try:
        return parse_row(parts.store.get(f"metrics/{step_name(step)}.json"))
    except (NotFound, ValueError):
        return None


def evaluation_fields(found: Mapping[str, Any]) -> dict[str, Value]:
    """The row fields of one evaluation."""
    fields: dict[str, Value] = {"seconds_evaluate": found["seconds"]}
    for score in found["scores"]:
        name, average = score["environment"], score["average"]
        told = {each: average[each] for each in ("mean", "low", "high")}
        told |= {"pass": score["pass_at"][str(max(map(int, score["pass_at"])))]["mean"], "unscored": score["failed"]}
        fields |= {evaluation_field(name, statistic): value for statistic, value in told.items()}
    return fields


def _sentence(found: Mapping[str, Any]) -> str:
    """Example: `step 10, evaluated: held-out 0.412 (0.351 to 0.473)`"""
    told = []
    for score in found["scores"]:
        average = score["average"]
        text = "no score" if average["mean"] is None else f"{average['mean']:.3f}"
        if average["low"] is not None:
            text += f" ({average['low']:.3f} to {average['high']:.3f})"
        told.append(f"{score['environment']} {text}" + (f", {score['failed']} unscored" if score["failed"] else ""))
    return f"step {found['step']}, evaluated: {'; '.join(told)}"
