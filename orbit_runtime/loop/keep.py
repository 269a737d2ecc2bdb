"""Making a step durable: rollouts, metrics row, then the checkpoint, whose manifest is written last.

Belongs here: the content of a checkpoint and the order in which it is written. Does not belong here: storing bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from orbit_runtime.checkpoints.adapter_folder import ADAPTERS, adapter_name
from orbit_runtime.data.records import compress_rollouts
from orbit_runtime.errors import OrbitError, OutputError, StorageError
from orbit_runtime.loop.buffer import EpisodeSnapshot, dump_snapshots, load_snapshots
from orbit_runtime.loop.collect import CollectedStep, EpisodeEvidence
from orbit_runtime.loop.publish import MODELS, BackgroundWriter
from orbit_runtime.loop.state import RunState
from orbit_runtime.observability.metrics import MetricsRow, row_digest
from orbit_runtime.observability.run_folder import find_best
from orbit_runtime.storage import (
    Bundle,
    CheckpointParts,
    Execution,
    Store,
    prune_bundles,
    restate_bundle,
    write_bundle,
)
from orbit_runtime.types import Group, Trainer

ROLLOUTS, ROLLOUTS_AT_END = "rollouts.jsonl.zst", "rollouts-at-end.jsonl.zst"
"""Parts of a checkpoint: rollouts of later steps at the end of its step, and at the time the run was stopped."""
MAX_REFERENCE = 2000
"""Characters of an expected answer kept for the report; rewards see all of it."""


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def checkpoint_prefix(step: int) -> str:
    return f"checkpoints/{step_name(step)}"


def keep_step(
    store: Store,
    execution: Execution,
    row: MetricsRow,
    collected: CollectedStep,
    *,
    before: MetricsRow | None,
    reference_fields: Sequence[str],
    trained: Mapping[tuple[str, int, int], Mapping[str, Any]],
    digests: dict[int, str],
) -> None:
    """Stores the step's rollouts, its metrics row and evidence of stopped episodes; overwritten if the step reruns.

    Args:
        trained: how each rollout was trained, by prompt, visit and sample; stored for the report.
        before: the previous step's row, stored again with the cost of its checkpoint.
        reference_fields: columns of the prompts that hold the expected answer; stored for the report.
        digests: gets the digest of the row, by step.

    Raises:
        OutputError: another execution took over; its rows are not touched.
    """
    execution.check()
    step, groups_P = int(row.number("step") or 0), collected.groups_P
    name = f"rollouts/{step_name(step)}"
    files = [(f"{name}.jsonl.zst", _rollout_file(groups_P, trained)), *_stopped_file(step, collected.stopped)]
    files += [_row_file(each) for each in (before, row) if each is not None]
    references = build_references(groups_P, reference_fields)
    if references:
        files.append((f"{name}.references.json", json.dumps(references, ensure_ascii=False).encode()))
    store.put_many(files)
    digests[step] = row_digest(row)


def build_references(groups_P: Sequence[Group], fields: Sequence[str]) -> dict[str, str]:
    """Prompt id → the expected answer of its row, for people: shortened, and omitted if the row has none."""
    references = {}
    for group in groups_P:
        values = [group.prompt.fields[field] for field in fields if group.prompt.fields.get(field) is not None]
        if values:
            texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
            references[group.prompt.prompt_id] = "\n".join(texts)[:MAX_REFERENCE]
    return references


def keep_rows(store: Store, execution: Execution, rows: Sequence[MetricsRow], digests: dict[int, str]) -> None:
    """Stores rows of steps that leave no rollouts, or the complete row of the last step.

    Args: digests: gets the digests of the rows, by step.
    """
    execution.check()
    store.put_many([_row_file(row) for row in rows])
    digests |= {int(row.number("step") or 0): row_digest(row) for row in rows}


@dataclass(frozen=True)
class Checkpoints:
    """Writes a run's checkpoints."""

    store: Store
    execution: Execution
    keeper: BackgroundWriter
    trainer: Trainer
    identity: str
    """Digest of everything that affects the run's numbers."""
    keep: int
    """Number of checkpoints to keep; 0 for all."""
    keep_best: int = 0
    """Number of adapters to keep for their evaluation."""

    def begin(self, state: RunState, cursor: Mapping[str, Any], kept: Sequence[EpisodeSnapshot]) -> None:
        """Writes everything an exact resume needs, under one manifest, and prunes checkpoints and adapters to `keep`.

        Args:
            cursor: position after the prompts of this step; those of later steps are drawn again.
            kept: rollouts of later steps.

        Writing overlaps the next step. The publish stores the adapter first, and `keep_step` the rollouts and the row;
        only then does the step exist.
        """
        step, prefix, name = state.step, checkpoint_prefix(state.step), adapter_name(state.version)
        facts = _facts(state, cursor, self.identity)
        parts = CheckpointParts(prefix)
        self.trainer.save_state(parts)

        def write() -> None:
            try:
                rollouts = {ROLLOUTS: dump_snapshots(kept)} if kept else {}
                write_bundle(self.store, self.execution, prefix, {**parts.contents, **rollouts}, facts)
            finally:
                parts.is_read.set()
            prune_bundles(self.store, "checkpoints/", self.keep, newest=prefix)
            best = find_best(self.store, step)[: self.keep_best] if self.keep_best else []
            spared = [f"{ADAPTERS}{adapter_name(each.step)}" for each in best]
            for folder in (ADAPTERS, MODELS):
                most = self.keep + 1 if self.keep else 0
                prune_bundles(self.store, folder, most, newest=f"{folder}{name}", spared=spared)

        # If the write never begins because the adapter could not be stored, nothing reads the parts either.
        self.keeper.submit(write).add_done_callback(lambda _: parts.is_read.set())
        state.checkpoint_begun = state.step

    def settle(self, state: RunState) -> None:
        """Waits until the newest publish and checkpoint are durable. Raises the error that prevented it."""
        self.keeper.wait()
        state.checkpoint_step = state.checkpoint_begun

    def restate(self, state: RunState, cursor: Mapping[str, Any], kept: Sequence[EpisodeSnapshot]) -> None:
        """Rewrites the newest checkpoint's manifest with the current facts and `kept`; its other parts stay."""
        assert state.checkpoint_step == state.step
        facts = _facts(state, cursor, self.identity)
        parts = {ROLLOUTS_AT_END: dump_snapshots(kept)} if kept else {}
        restate_bundle(self.store, self.execution, checkpoint_prefix(state.step), facts, parts)


def load_rollouts(bundle: Bundle) -> tuple[EpisodeSnapshot, ...]:
    """The newest rollouts of later steps that the checkpoint holds."""
    for name in (ROLLOUTS_AT_END, ROLLOUTS):
        if name in bundle.parts:
            return load_snapshots(bytes(bundle.parts[name]), where=f"{bundle.prefix}/{name}")
    return ()


def _facts(state: RunState, cursor: Mapping[str, Any], identity: str) -> dict[str, Any]:
    assert state.publication is not None
    return {
        "step": state.step,
        "policy_version": state.version,
        "adapter_digest": state.publication.adapter.digest,
        "cursor": dict(cursor),
        "identity": identity,
        "proof": state.publication.proof.to_json() if state.publication.proofs else None,
        "summary": state.facts(),
        "rows": dict(state.rows),
    }


def keep_failure(
    store: Store,
    step: int,
    error: OrbitError,
    collected: CollectedStep | None,
    unanswered: Sequence[EpisodeEvidence] = (),
    stacks: str = "",
) -> None:
    """Stores evidence of a step that stopped the run: its rollouts, the error, and the episodes that hung.

    Args:
        unanswered: episodes that waited for the engine when it failed.
        stacks: of all threads, where one waits for a device.

    Nothing is written if the store itself failed or another execution owns the folder. An error while writing never
    hides the error being reported.
    """
    if isinstance(error, (OutputError, StorageError)):
        return
    with suppress(OrbitError):
        store.put(f"failures/{step_name(step)}.json", json.dumps(error.to_json(), indent=1).encode())
        if collected is not None:
            store.put(f"failures/{step_name(step)}.jsonl.zst", _rollout_file(collected.groups_P))
        store.put_many(_stopped_file(step, (*(collected.stopped if collected else ()), *unanswered)))
        if stacks:
            store.put(stacks_name(step), stacks.encode())


def stacks_name(step: int) -> str:
    return f"failures/{step_name(step)}.stacks.txt"


def stopped_name(step: int) -> str:
    return f"failures/{step_name(step)}.stopped.jsonl"


def _stopped_file(step: int, stopped: Sequence[EpisodeEvidence]) -> list[tuple[str, bytes]]:
    """JSON Lines, one object for each stopped episode; no file if none stopped."""
    lines = [json.dumps(asdict(each), ensure_ascii=False).encode(errors="replace") + b"\n" for each in stopped]
    return [(stopped_name(step), b"".join(lines))] if lines else []


def _row_file(row: MetricsRow) -> tuple[str, bytes]:
    return f"metrics/{step_name(int(row.number('step') or 0))}.json", row.to_json().encode()


def _rollout_file(
    groups_P: Sequence[Group], trained: Mapping[tuple[str, int, int], Mapping[str, Any]] = MappingProxyType({})
) -> bytes:
    rollouts = [(group.prompt, rollout) for group in groups_P for rollout in group.rollouts_G]
    return compress_rollouts(
        (rollout for _, rollout in rollouts),
        [trained.get((prompt.prompt_id, prompt.visit, rollout.sample_index), {}) for prompt, rollout in rollouts],
    )
