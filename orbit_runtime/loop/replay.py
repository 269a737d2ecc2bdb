"""Trains on a run's recorded rollouts again, without engine or rewards, to get the same adapter bit for bit.

Belongs here: reading what a run recorded, and comparing. Does not belong here: how a batch trains (`training`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial

from orbit_runtime.adapters.buffer import publishable
from orbit_runtime.algorithms.custom_loss import own_targets
from orbit_runtime.data.records import decompress_rollouts
from orbit_runtime.errors import DataError, ModelError, UsageError
from orbit_runtime.loop.advantages import build_batch
from orbit_runtime.loop.keep import step_name
from orbit_runtime.loop.own_code import read_records, recorded_path
from orbit_runtime.loop.resume import INITIAL_CONTENT, INITIAL_FIELD, find_origin, open_initial
from orbit_runtime.model_info.content import cached_weights_digest
from orbit_runtime.observability.metrics import MetricsRow, parse_row
from orbit_runtime.observability.run_folder import add_rows, read_run_folder, row_faults
from orbit_runtime.sides.inputs import WEIGHTS, Inputs
from orbit_runtime.sides.interface import TrainerOrder
from orbit_runtime.sides.local import LocalSides
from orbit_runtime.sides.machine import explain_rounding, machine_facts
from orbit_runtime.sides.teacher import CONTENT, FIELD, open_teacher, teacher_digest
from orbit_runtime.sides.trainers import load_algorithm
from orbit_runtime.spec import OrbitRun, resolve
from orbit_runtime.spec.resolve import in_one_process
from orbit_runtime.spec.run import upgrade_manifest
from orbit_runtime.storage import NotFound, Store, read_run_file
from orbit_runtime.storage.cache import Cache, RetryPolicy, default_cache
from orbit_runtime.types import Group, Prompt, Rollout


@dataclass(frozen=True)
class Replay:
    """The replayed steps, and whether this process can reproduce the run's bits."""

    steps: tuple[ReplayedStep, ...]
    elsewhere: tuple[str, ...]
    """Differences between this process and those that trained the run, in facts that decide how sums are rounded."""

    @property
    def is_equal(self) -> bool:
        return all(step.is_equal for step in self.steps)


@dataclass(frozen=True)
class ReplayedStep:
    """One step, as recorded and as replayed."""

    step: int
    recorded: str
    """Digest of the adapter that the run published after this step."""
    replayed: str

    @property
    def is_equal(self) -> bool:
        return self.recorded == self.replayed


def replay(
    store: Store, *, steps: int | None, show: Callable[[int, int], None], search_path: Sequence[str] = ()
) -> Replay:
    """Replays steps in order, and ends at the first that differs, because all later ones would too.

    Args:
        store: a run folder; nothing is written to it.
        steps: maximum number of steps to replay.
        show: called after each step with the number of steps done and the total.
        search_path: folders that a custom loss or advantage function is imported from, after `environment.code`, if
            the run recorded no code.

    Raises:
        UsageError: there is no run, or the checkpoint that it began from is gone.
        ModelError: the base has changed.
        DataError: rollouts, the row of a step or recorded code are missing or unreadable.
    """
    before = read_run_file(store)
    rows = _rows(store)
    if before is None or not rows:
        raise UsageError("there is no run with a finished step here", where=store.uri, fix="name a run folder")
    if before["resolved"]["spec"]["algorithm"]["type"] == "SFT":
        raise UsageError(
            "this run learned from demonstrations, and recorded no rollouts",
            where=store.uri,
            fix="run its manifest again into another folder, and compare the adapters' digests",
        )
    # If ranks trained the run, the last bits differ, and `rounding` says so.
    resolved = resolve(in_one_process(OrbitRun.model_validate(upgrade_manifest(before["resolved"]))), machine_facts())
    spec = resolved.run.spec
    inputs = Inputs(spec, before.get("inputs", {}), RetryPolicy(), search_path)
    numbers = [int(row.number("step") or 0) for row in rows[:steps]]
    targets = [*own_targets(spec.algorithm).values()]
    with ExitStack() as closing:
        path = cache(partial(recorded_path, read_records(store), numbers, targets, inputs.search_path, closing))
        algorithm = load_algorithm(resolved, path)
        sides = LocalSides()
        sides.load_loss(resolved, path, None)
        folder = inputs.model()
        if cached_weights_digest(folder, Cache(default_cache(os.environ))) != before["identity"].get(WEIGHTS):
            raise ModelError("the base has changed since the run began", where=spec.model.uri)
        resolved = sides.settle(resolved, folder)
        teacher = open_teacher(spec)
        if teacher_digest(teacher).get(CONTENT) != before["identity"].get(CONTENT):
            raise ModelError("the teacher's adapter has changed since the run began", where=f"{FIELD}.uri")
        side = sides.open(TrainerOrder(resolved, folder, before["names"]["model"], closing, teacher))
        trainer = side.trainer
        origin = find_origin(resolved.run, before)
        if origin is not None:
            trainer.load_state(origin.bundle.parts)
        initial = open_initial(spec, before)
        if initial is not None:
            if before["identity"].get(INITIAL_CONTENT) != initial.digest:
                raise ModelError("the adapter has changed since the run began with it", where=INITIAL_FIELD)
            side.begin(initial.folder, initial.digest)
        done: list[ReplayedStep] = []
        for row in rows[:steps]:
            step = int(row.number("step") or 0)
            trainer.update(build_batch(spec, algorithm, trainer, _groups(store, step)))
            version = int(row.number("policy_version") or 0)
            done.append(ReplayedStep(step, str(row["adapter_digest"]), publishable(trainer, version).digest))
            show(len(done), len(rows[:steps]))
            if not done[-1].is_equal:
                break
        return Replay(tuple(done), tuple(explain_rounding(before.get("rounding", []), side.rounding)))


def _rows(store: Store) -> list[MetricsRow]:
    where, fix = "metrics.jsonl", "remove the file: the rows are in metrics/ as well"
    try:
        lines = store.get(where).splitlines()
    except NotFound:
        # The run is in progress, or was killed.
        lines = [store.get(key) for key in sorted(store.list("metrics/"))]
        where, fix = "metrics/", "restore its files from a copy of the folder"
    try:
        by_step = {int(row.number("step") or 0): row for row in map(parse_row, lines)}
    except ValueError:
        raise DataError(
            "a step's row is not JSON: the file is damaged", where=f"{store.uri}/{where}", fix=fix
        ) from None
    by_step |= add_rows(store, by_step)
    for fault in row_faults(by_step, read_run_folder(store, ()).facts, by_step):
        raise DataError(fault, where=store.uri)
    return [by_step[step] for step in sorted(by_step)]


def _groups(store: Store, step: int) -> list[Group]:
    key = f"rollouts/{step_name(step)}.jsonl.zst"
    try:
        rollouts = decompress_rollouts(store.get(key), where=f"{store.uri}/{key}")
    except NotFound:
        fix = f"restore the file from a copy of the folder, or replay the steps before with --steps {step - 1}"
        raise DataError(f"step {step} has no recorded rollouts", where=f"{store.uri}/{key}", fix=fix) from None
    groups: list[list[Rollout]] = []
    for rollout in rollouts:
        if rollout.sample_index == 0:
            groups.append([])
        groups[-1].append(rollout)
    return [_group(each) for each in groups]


def _group(rollouts: Sequence[Rollout]) -> Group:
    """A group without the prompt's text, which training does not need: each rollout contains the prompt's tokens."""
    return Group(Prompt(rollouts[0].prompt_id, 0, (), {}), tuple(rollouts))
