"""From what was asked to what is done: `Auto` decided once, the three sets of fields, and the identity of a run.

Belongs here: pure functions of a manifest and of facts about the machine. Does not belong here: finding those facts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel

from orbit_runtime.spec.run import OrbitRun


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What `Auto` is decided from."""

    has_cuda: bool
    num_gpus: int


@dataclass(frozen=True, slots=True)
class Resolved:
    """A manifest with every choice made."""

    run: OrbitRun
    trainer: str
    engine: str
    device: str
    """`cpu` or `cuda`."""
    compute_dtype: str
    """Of activations: `float32` on a CPU, where BF16 arithmetic is slow, `bfloat16` on a GPU."""
    attention: str
    decay_steps: int | None
    """Where a decaying schedule reaches 0: fixed at the first start, so that longer training does not bend it."""
    identity: str
    """Digest of every field that changes the numbers."""

    def to_json(self) -> dict[str, Any]:
        """For `run.json`: the decisions, without the manifest."""
        return {key: value for key, value in asdict(self).items() if key != "run"}


class Difference(NamedTuple):
    """A field whose value differs between two manifests."""

    path: str
    set: str
    """`identity`, `layout` or `display`."""
    old: Any
    new: Any


def resolve(run: OrbitRun, machine: MachineFacts, *, decay_steps: int | None = None) -> Resolved:
    """Decides every `Auto`. `decay_steps` is what an earlier start of this run decided, if there was one."""
    training = run.spec.training
    schedule = training.schedule
    decay = None if schedule.type == "Constant" else schedule.decay_steps or decay_steps or training.steps
    return Resolved(
        run=run,
        trainer="Torch",
        engine="Torch",
        device="cuda" if machine.has_cuda else "cpu",
        compute_dtype="bfloat16" if machine.has_cuda else "float32",
        attention="SDPA" if training.attention == "Auto" else training.attention,
        decay_steps=decay,
        identity=identity_digest(run),
    )


def field_sets(run: OrbitRun) -> Iterator[tuple[str, str, Any]]:
    """(path, set, value) of every leaf field, paths as in the file: `spec.training.learningRate`."""
    yield from _leaves(run, "")


def identity_fields(run: OrbitRun) -> dict[str, Any]:
    """Path → value of every field that changes the numbers of a run."""
    return {path: value for path, kind, value in field_sets(run) if kind == "identity"}


def identity_digest(run: OrbitRun) -> str:
    """`sha256:…` of the canonical JSON of `identity_fields`."""
    text = json.dumps(identity_fields(run), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def differences(old: Mapping[str, Any], new: OrbitRun) -> list[Difference]:
    """Leaf fields that differ between a manifest as `run.json` keeps it and one of today, in the order of the file."""
    before = {path: value for path, _, value in field_sets(OrbitRun.model_validate(old))}
    found = []
    seen = set()
    for path, kind, value in field_sets(new):
        seen.add(path)
        if before.get(path) != value:
            found.append(Difference(path, kind, before.get(path), value))
    gone = [(path, value) for path, value in before.items() if path not in seen]
    return found + [Difference(path, "identity", value, None) for path, value in gone]


def _leaves(block: BaseModel, prefix: str) -> Iterator[tuple[str, str, Any]]:
    for name, field in type(block).model_fields.items():
        value = getattr(block, name)
        path = f"{prefix}{field.alias or name}"
        extra = field.json_schema_extra
        kind = extra.get("orbitSet") if isinstance(extra, dict) else None
        if isinstance(kind, str):
            yield path, kind, _plain(value)
        elif isinstance(value, BaseModel):
            yield from _leaves(value, f"{path}.")
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                yield from _leaves(item, f"{path}[{index}].")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
