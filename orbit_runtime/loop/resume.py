"""How a run begins: continued from its folder, or new from another run's checkpoint (`spec.checkpoint.resumeFrom`) or
with an adapter from another training (`spec.adapter.initFrom`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orbit_runtime.adapters.files import files_digest
from orbit_runtime.checkpoints.adapter_folder import AdapterFolder, find_adapter
from orbit_runtime.errors import GateError, ModelError, OutputError, UsageError
from orbit_runtime.loop.keep import load_rollouts
from orbit_runtime.loop.parts import RunParts
from orbit_runtime.loop.state import RunState
from orbit_runtime.observability.metrics import row_digest
from orbit_runtime.observability.run_folder import read_stored_rows, row_faults
from orbit_runtime.sides.inputs import PREFIX, WEIGHTS
from orbit_runtime.spec import OrbitRun, Resolved, differences, identity_fields
from orbit_runtime.spec.adapter import Adapter
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.storage import (
    Bundle,
    CorruptBundle,
    NotFound,
    Store,
    newest_readable,
    open_store,
    read_bundle,
    read_run_file,
)

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


RESUME_FIELD = "spec.checkpoint.resumeFrom"
CHECKPOINTS = "checkpoints/"


@dataclass(frozen=True)
class Origin:
    """A checkpoint of another run, and that run's `run.json`."""

    uri: str
    bundle: Bundle
    run: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.bundle.facts["step"])

    def to_json(self) -> dict[str, Any]:
        """The entry in the new run's `run.json`; a restart before its first own checkpoint uses the same origin."""
        digest = self.bundle.facts["adapter_digest"]
        return {"uri": self.uri, "checkpoint": self.bundle.prefix.rstrip("/"), "adapter_digest": digest}


def find_origin(run: OrbitRun, before: Mapping[str, Any] | None) -> Origin | None:
    """The checkpoint to begin from; None if the manifest names no other run.

    Args:
        before: this run's own `run.json`, if it was started before.

    Raises:
        UsageError: there is no such checkpoint, or nothing would be left to train.
    """
    asked = run.spec.checkpoint.resume_from
    if asked is None:
        return None
    uri, _, named = asked.rstrip("/").partition(f"/{CHECKPOINTS}")
    store = open_store(uri, writable=False)
    origin_run = read_run_file(store)
    if origin_run is None:
        raise UsageError(
            "there is no run to begin from",
            where=f"{RESUME_FIELD}: {store.uri}",
            fix="name a run folder; `orbit ls` lists them",
        )
    known = ((before or {}).get("origin") or {}).get("checkpoint")
    bundle = _read(store, known or (f"{CHECKPOINTS}{named}" if named else None))
    origin = Origin(store.uri, bundle, origin_run)
    if run.spec.training.steps <= origin.step:
        raise UsageError(
            f"{RESUME_FIELD} is at step {origin.step} already, and {run.spec.training.steps} steps were requested",
            where="spec.training.steps",
            fix=f"write more than {origin.step}: steps are counted from the first run's first",
        )
    return origin


def _read(store: Store, prefix: str | None) -> Bundle:
    if prefix is None:
        newest, skipped = newest_readable(store, CHECKPOINTS)
        if newest is None:
            raise UsageError(
                "; ".join(["this run has no complete checkpoint", *skipped]),
                where=f"{RESUME_FIELD}: {store.uri}",
                fix="name a run that has one",
            )
        return newest
    try:
        return read_bundle(store, prefix)
    except (NotFound, CorruptBundle) as error:
        raise UsageError(
            f"{prefix} is no complete checkpoint: {error}",
            where=f"{RESUME_FIELD}: {store.uri}",
            fix="name another, or the run folder for its newest",
        ) from None


def begin_from(parts: RunParts, state: RunState, origin: Origin) -> None:
    """Restores trainer and counters from the other run's checkpoint, and the prompt cursor if the prompts are the same.

    Raises:
        UsageError: its adapter is of another kind, or belongs to another base.
    """
    facts, then = origin.bundle.facts, origin.run["identity"]
    if then.get(WEIGHTS) != parts.content[WEIGHTS]:
        raise UsageError(
            f"that adapter was trained on another base ({str(then.get(WEIGHTS))[:19]}…, this one is "
            f"{parts.content[WEIGHTS][:19]}…)",
            where=RESUME_FIELD,
            fix="write the model and precision of that run",
        )
    if Adapter.model_validate(origin.run["resolved"]["spec"]["adapter"]) != parts.spec.adapter:
        raise UsageError(
            "that run's `adapter` is different", where=RESUME_FIELD, fix="write the `spec.adapter` of that run"
        )
    parts.trainer.load_state(origin.bundle.parts)
    state.step, state.policy_version = origin.step, int(facts["policy_version"])
    if origin.run["names"]["model"] == parts.names.model:
        # The published files contain the model's name, so another name gives another digest.
        state.expected_digest = str(facts["adapter_digest"])
    taken = _of_prompts(then) == _of_prompts({**identity_fields(parts.run), **parts.content})
    if taken:
        parts.prompts.restore(facts["cursor"])
    parts.show.note(
        f"beginning from step {origin.step} of {origin.uri}"
        + ("" if taken else "; its prompts differ, so these are drawn from the first"),
        origin=origin.to_json(),
    )


def _of_prompts(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Settings and content that decide which prompts are drawn, and in which order."""
    return {path: each for path, each in identity.items() if path.startswith((f"{PREFIX}data.", "spec.data."))}


INITIAL_FIELD = "spec.adapter.initFrom"
INITIAL_CONTENT = "content.adapter"
"""Name of the adapter's digest among the digests of what a run reads."""


@dataclass(frozen=True)
class InitialAdapter:
    """The adapter, as read at the start."""

    folder: AdapterFolder
    digest: str
    """Digest of the adapter's files."""

    def to_json(self) -> dict[str, Any]:
        """The entry in `run.json`; a restart before the first checkpoint uses the same adapter."""
        return {"uri": self.folder.place, "digest": self.digest}


def open_initial(spec: RunSpec, before: Mapping[str, Any] | None) -> InitialAdapter | None:
    """The adapter to begin with; None if the run begins with one that changes nothing.

    Args:
        before: this run's own `run.json`, if it was started before.

    Raises:
        ModelError: (66) there is no adapter, Orbit does not compute with its kind, or it is not the one that
            `spec.adapter` describes.
    """
    asked = spec.adapter.init_from
    if asked is None:
        return None
    known = ((before or {}).get("initial") or {}).get("uri")
    folder = find_adapter(known or asked)
    if folder is None:
        raise ModelError(
            "there is no adapter here",
            where=f"{INITIAL_FIELD}: {asked}",
            fix="name a run folder with adapters, or the folder of one, such as runs/<run>/adapters/policy-v40",
        )
    check_adapter(spec.adapter, folder)
    return InitialAdapter(folder, files_digest(folder.files))


def initial_digest(initial: InitialAdapter | None, before: Mapping[str, Any] | None) -> dict[str, str]:
    """Name → digest, for the run's identity; without an adapter now, the digest that the first start recorded."""
    if initial is not None:
        return {INITIAL_CONTENT: initial.digest}
    known = (before or {}).get("identity", {}).get(INITIAL_CONTENT)
    return {} if known is None else {INITIAL_CONTENT: str(known)}


def check_adapter(adapter: Adapter, folder: AdapterFolder) -> None:
    """Raises ModelError (66) if `spec.adapter` does not describe this adapter."""
    wanted: dict[str, Any] = {"type": adapter.type}
    found: dict[str, Any] = {"type": folder.type}
    if adapter.lora is not None and folder.type == "LoRA":
        lora = adapter.lora
        root = lora.rank**0.5 if lora.rslora else lora.rank
        wanted |= {"lora.rank": lora.rank, "scaling": lora.alpha / root}
        found |= {"lora.rank": folder.rank, "scaling": folder.scaling}
    if adapter.oft is not None and folder.type == "OFT":
        wanted |= {"oft.blockSize": adapter.oft.block_size, "oft.parametrization": adapter.oft.parametrization}
        found |= {"oft.blockSize": folder.rank, "oft.parametrization": folder.parametrization}
        if {folder.parametrization, adapter.oft.parametrization} == {"CayleyNeumann"}:
            wanted["oft.neumannTerms"] = adapter.oft.neumann_terms
            found["oft.neumannTerms"] = folder.neumann_terms
    differ = [f"{name} {found[name]}, this run's is {wanted[name]}" for name in wanted if found[name] != wanted[name]]
    if differ:
        raise ModelError(
            f"the adapter {folder.place} does not match spec.adapter: {'; '.join(differ)}",
            where=INITIAL_FIELD,
            fix="write the `spec.adapter` of the run that made it",
        )


def begin_with(parts: RunParts, state: RunState, initial: InitialAdapter) -> None:
    """Gives the adapter to the trainer, before its first step.

    Raises:
        ModelError: (66) it belongs to another base, or its tensors are not those of this run's adapter.
    """
    initial.folder.check_base(
        parts.content[WEIGHTS],
        who=f"the adapter {initial.folder.place}",
        ours="this run's is",
        where=INITIAL_FIELD,
        fix="write the model and precision that it was trained on, or take an adapter of this base",
    )
    if initial.folder.base_weights is None:
        state.warn(f"{INITIAL_FIELD}: the adapter does not record its base; only its shapes were compared")
    parts.side.begin(initial.folder, initial.digest)
    why = f" ({initial.folder.chosen})" if initial.folder.chosen else ""
    parts.show.note(f"beginning with the adapter {initial.folder.place}{why}")
