"""Beginning a new run from another run's checkpoint: `spec.checkpoint.resumeFrom`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orbit_runtime.errors import UsageError
from orbit_runtime.loop.parts import RunParts
from orbit_runtime.loop.state import RunState
from orbit_runtime.sides.inputs import PREFIX, WEIGHTS, check_weights_known
from orbit_runtime.spec import OrbitRun, identity_fields
from orbit_runtime.spec.adapter import Adapter
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

FIELD = "spec.checkpoint.resumeFrom"
FOLDER = "checkpoints/"


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
    uri, _, named = asked.rstrip("/").partition(f"/{FOLDER}")
    store = open_store(uri, writable=False)
    origin_run = read_run_file(store)
    if origin_run is None:
        raise UsageError(
            "there is no run to begin from",
            where=f"{FIELD}: {store.uri}",
            fix="name a run folder; `orbit ls` lists them",
        )
    known = ((before or {}).get("origin") or {}).get("checkpoint")
    bundle = _read(store, known or (f"{FOLDER}{named}" if named else None))
    origin = Origin(store.uri, bundle, origin_run)
    if run.spec.training.steps <= origin.step:
        raise UsageError(
            f"{FIELD} is at step {origin.step} already, and {run.spec.training.steps} steps were requested",
            where="spec.training.steps",
            fix=f"write more than {origin.step}: steps are counted from the first run's first",
        )
    return origin


def _read(store: Store, prefix: str | None) -> Bundle:
    if prefix is None:
        newest, skipped = newest_readable(store, FOLDER)
        if newest is None:
            raise UsageError(
                "; ".join(["this run has no complete checkpoint", *skipped]),
                where=f"{FIELD}: {store.uri}",
                fix="name a run that has one",
            )
        return newest
    try:
        return read_bundle(store, prefix)
    except (NotFound, CorruptBundle) as error:
        raise UsageError(
            f"{prefix} is no complete checkpoint: {error}",
            where=f"{FIELD}: {store.uri}",
            fix="name another, or the run folder for its newest",
        ) from None


def begin_from(parts: RunParts, state: RunState, origin: Origin) -> None:
    """Restores trainer and counters from the other run's checkpoint, and the prompt cursor if the prompts are the same.

    Raises:
        UsageError: its adapter is of another kind, or belongs to another base.
    """
    facts, then = origin.bundle.facts, origin.run["identity"]
    check_weights_known(origin.uri, then)
    if then.get(WEIGHTS) != parts.content[WEIGHTS]:
        raise UsageError(
            f"that adapter was trained on another base ({str(then.get(WEIGHTS))[:19]}…, this one is "
            f"{parts.content[WEIGHTS][:19]}…)",
            where=FIELD,
            fix="write the model and precision of that run",
        )
    if Adapter.model_validate(origin.run["resolved"]["spec"]["adapter"]) != parts.spec.adapter:
        raise UsageError("that run's `adapter` is different", where=FIELD, fix="write the `spec.adapter` of that run")
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
