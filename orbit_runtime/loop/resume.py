"""Continuing a run from its folder: whether it is the same run, and from which checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from orbit_runtime.errors import GateError, OutputError
from orbit_runtime.loop.keep import load_rollouts
from orbit_runtime.loop.parts import RunParts
from orbit_runtime.loop.state import RunState
from orbit_runtime.observability.metrics import row_digest
from orbit_runtime.observability.run_folder import read_stored_rows, row_faults
from orbit_runtime.sides.inputs import check_digest_scheme
from orbit_runtime.spec import Resolved, differences
from orbit_runtime.storage import Bundle, Store, newest_readable

MOVABLE = re.compile(
    r"spec\.((model|data\.prompts\[\d+\]|environment\.code|algorithm\.teacher)\.uri|adapter\.initFrom)"
)


def check_same_run(store: Store, before: Mapping[str, Any], resolved: Resolved) -> list[str]:
    """Refuses the settings of a different run; returns one line for each setting that changed and may change.

    A new location of model, prompts or code does not make a different run; `content` checks that they are the same.

    Raises:
        OutputError: identity fields differ; the message gives both values of each.
    """
    changed = differences(before["resolved"], resolved.run.to_manifest())
    refused = [each for each in changed if each.set == "identity"]
    if refused:
        lines = "".join(f"\n  {each.path}: {each.old!r} then, {each.new!r} now" for each in refused)
        raise OutputError(
            f"the folder holds a run with other settings that affect its numbers:{lines}",
            where=store.uri,
            fix="restore those fields to continue it, or choose another --out for a new run",
        )
    return [
        f"{each.path} moved from {each.old} to {each.new}, with the same content"
        if MOVABLE.fullmatch(each.path)
        else f"{each.path}: {each.old!r} then, {each.new!r} now"
        for each in changed
        # A field left to the plan has not changed.
        if each.new != "Auto"
    ]


def find_checkpoint(store: Store, *, in_place: bool = False) -> tuple[Bundle | None, tuple[str, ...]]:
    """The newest valid checkpoint, and why newer ones are invalid. Args: in_place: another process reads it."""
    return newest_readable(store, "checkpoints/", in_place=in_place)


def restored_wrongly(found: str, state: RunState) -> GateError:
    """Args: found: digest of the adapter that the restored trainer holds."""
    return GateError(
        f"the restored trainer publishes {found[:19]}…, not the checkpoint's {str(state.expected_digest)[:19]}…",
        where=f"checkpoints/step-{state.step:06d}",
        fix="the checkpoint was not restored exactly; delete it to continue from the one before",
    )


def restore(parts: RunParts, state: RunState, bundle: Bundle) -> None:
    """Restores trainer, prompts and counters from the checkpoint; the engine follows with the next publish.

    Raises:
        OutputError: the checkpoint belongs to another run.
        StorageError: the row of a finished step is damaged.
    """
    facts = bundle.facts
    if facts["identity"] != parts.identity:
        raise OutputError(
            f"{bundle.prefix} was written by a different run",
            where=parts.store.uri,
            fix="choose another --out",
        )
    check_digest_scheme(parts.store.uri, str(facts["adapter_digest"]))
    parts.trainer.load_state(bundle.parts)
    parts.prompts.restore(facts["cursor"])
    state.step = state.checkpoint_step = state.checkpoint_begun = int(facts["step"])
    state.policy_version, state.expected_digest = int(facts["policy_version"]), str(facts["adapter_digest"])
    state.kept = load_rollouts(bundle)
    state.restore(facts["summary"])
    rows = read_stored_rows(parts.store, state.step)
    listed = {int(step): digest for step, digest in facts.get("rows", {}).items()}
    state.rows = {step: row_digest(row) for step, row in rows.items() if step not in listed} | listed
    for fault in row_faults(rows, facts, rows):
        state.warn(fault)
