"""Resolves a manifest: decides `Auto` once, digests the fields that change the maths, finds differences.

Belongs here: decisions that need the manifest and a few facts of the machine. Does not belong here: looking at the
machine, the model or the store; their owners hand the facts in.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from orbit_runtime.spec.block import Block, FieldSet, inner_blocks
from orbit_runtime.spec.fields import field_sets, later_defaults
from orbit_runtime.spec.rollout import Rollout
from orbit_runtime.spec.run import OrbitRun, RunSpec
from orbit_runtime.spec.training import StopWhen, usual_rate

EMPTY: Mapping[str, str] = MappingProxyType({})
AUTO_BUILTIN_PRECISION: Literal["INT4"] = "INT4"
"""Meaning of `precision: Auto` for a shipped model: the variant that shows a frozen quantised base."""


SMALLEST_BF16 = 50e6
"""Parameters from which products take most of a pass, so that a processor with BF16 instructions is faster in BF16."""


def has_bf16_products(flags: Collection[str]) -> bool:
    """Args: flags: a processor's, as Linux names them."""
    return not {"amx_bf16", "avx512_bf16"}.isdisjoint(flags)


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts from which `Auto` is decided."""

    has_cuda: bool
    num_gpus: int
    """GPUs of this machine; other nodes' are not counted."""
    joins_nodes: bool = False
    """A Ray cluster is named, whose nodes are for ranks where `placement.nodes` asks for several."""
    multiplies_bf16: bool = False
    """The processor has instructions for products of BF16 (`has_bf16_products`)."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A run with nothing left open."""

    asked: OrbitRun
    """The manifest in the file, after `--set` and `${VAR}`."""
    run: OrbitRun
    """The same with `Auto` decided and the paths of model and prompts absolute.

    What stays `Auto`: `precision` of a model folder, where the manifest does not claim one, as the checkpoint says it;
    `training.recompute`, and on several GPUs trainer and engine, as the plan says them (`with_trainer`);
    `observability.logFormat`, which depends on who watches each start. `training.learningRate` may be unset, and
    `model.computePrecision` be `Auto`, until the model is there (`with_size`), `rollout.sampling.maxNewTokens` until
    the prompts are too (`with_new_tokens`).
    """
    device: Literal["cpu", "cuda"]

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16"]:
        return "bfloat16" if self.run.spec.model.compute_precision == "BF16" else "float32"

    @property
    def trainer(self) -> str:
        return self.run.spec.training.trainer

    @property
    def engine(self) -> str:
        return self.run.spec.rollout.engine

    @property
    def decay_steps(self) -> int | None:
        """Step at which the learning rate reaches 0; `None` for a constant one."""
        return self.run.spec.training.schedule.decay_steps

    @property
    def identity(self) -> str:
        """Digest of every setting that changes the maths; what model and prompts hold is known only to a run."""
        return identity_digest(self.run)

    def to_json(self) -> dict[str, Any]:
        """The entry in `run.json`: both manifests, what was decided beside them, and the identity."""
        return {
            "asked": self.asked.to_manifest(),
            "resolved": self.run.to_manifest(),
            "device": self.device,
            "compute_dtype": self.compute_dtype,
            "identity": self.identity,
        }


class FieldDifference(NamedTuple):
    """A field that differs between two manifests; `None` where it is not set."""

    path: str
    set: FieldSet
    old: Any
    new: Any


def resolve(run: OrbitRun, machine: MachineFacts, *, folder: Path | None = None) -> Resolved:
    """Decide all that is `Auto`.

    Args:
        folder: the manifest's; its relative paths of model and prompts start there. Unset, the current folder.
    """
    spec, base = run.spec, Path.cwd() if folder is None else folder
    decided = _decide_identity(run)
    training = decided.spec.training
    attention = training.decided_attention(spec.model.max_sequence_length)
    trainer = _decide_trainer(training.trainer, machine, spec.placement.nodes)
    rollout = _decide_rollout(spec.rollout, spec.placement.layout, trainer)
    decided = _with_spec(
        decided,
        **{name: _with_absolute(getattr(decided.spec, name), base) for name in _READ_FROM_PATHS},
        rollout=rollout,
        training=_changed(training, trainer=trainer, attention=attention, stop_when=_decide_stop(spec)),
        placement=_changed(spec.placement, base_copies=_decide_copies(rollout, spec.placement.base_copies)),
    )
    apart = trainer != "Torch" or rollout.engine != "Torch" or spec.adapter.type == "Full"
    may_bf16 = machine.multiplies_bf16 and not apart and not spec.model.uri.startswith("builtin://")
    compute = spec.model.compute_precision
    if compute == "Auto" and (machine.has_cuda or not may_bf16):
        compute = "BF16" if machine.has_cuda else "FP32"
    decided = _with_spec(decided, model=_changed(decided.spec.model, compute_precision=compute))
    return Resolved(run, decided, "cuda" if machine.has_cuda else "cpu")


_READ_FROM_PATHS = ("model", "adapter", "algorithm", "data", "environment", "evaluation")
"""Blocks whose addresses may be paths that start at the manifest's folder."""


def _with_absolute[B: Block](block: B, base: Path) -> B:
    """With every address in it, and in the blocks within it, absolute."""
    addresses = {name: getattr(block, name, None) for name in ("uri", "init_from")}
    changes: dict[str, Any] = {name: absolute_uri(uri, base) for name, uri in addresses.items() if uri is not None}
    for inner in inner_blocks(type(block)):
        value = getattr(block, inner.name)
        if inner.is_list:
            changes[inner.name] = tuple(_with_absolute(each, base) for each in value)
        elif value is not None:
            changes[inner.name] = _with_absolute(value, base)
    return _changed(block, **changes)


def in_one_process(run: OrbitRun, **blocks: Block) -> OrbitRun:
    """The manifest with the Torch trainer, for who replays or serves a run and so holds its whole model.

    Args: blocks: in place of the manifest's; a server's `rollout`.
    """
    return _with_spec(run, training=_changed(run.spec.training, trainer="Torch"), **blocks)


def with_sequences(run: OrbitRun, longest_prompt: int) -> OrbitRun:
    """The manifest with no longer sequences than its prompts and completions make, for who plans memory."""
    spec = run.spec
    longest = min(spec.model.max_sequence_length, longest_prompt + spec.new_tokens)
    return _with_spec(run, model=_changed(spec.model, max_sequence_length=longest))


def with_trainer(resolved: Resolved, trainer: str) -> Resolved:
    """The manifest with the plan's `training.trainer`, and what follows from it; unchanged if nothing was left to the
    plan.
    """
    spec = resolved.run.spec
    if spec.training.trainer != "Auto":
        return resolved
    asked = resolved.asked.spec
    rollout = _decide_rollout(spec.rollout, spec.placement.layout, trainer)
    decided = _with_spec(
        resolved.run,
        rollout=rollout,
        training=_changed(spec.training, trainer=trainer),
        placement=_changed(spec.placement, base_copies=_decide_copies(rollout, asked.placement.base_copies)),
    )
    return replace(resolved, run=decided)


def with_size(resolved: Resolved, num_parameters: float) -> Resolved:
    """The manifest with a learning rate and a dtype of products that suit a model of that size, where it has none.

    Args: num_parameters: infinite if unknown.
    """
    spec, training = resolved.run.spec, resolved.run.spec.training
    rate = training.learning_rate or usual_rate(spec.adapter.type, num_parameters)
    compute = spec.model.compute_precision
    if compute == "Auto":
        compute = "BF16" if SMALLEST_BF16 <= num_parameters < math.inf else "FP32"
    model = _changed(spec.model, compute_precision=compute)
    return replace(resolved, run=_with_spec(resolved.run, model=model, training=_changed(training, learning_rate=rate)))


def with_new_tokens(run: OrbitRun, tokens: int | None) -> OrbitRun:
    """The manifest with that `rollout.sampling.maxNewTokens`; unchanged if it has one."""
    rollout = run.spec.rollout
    sampling = _changed(rollout.sampling, max_new_tokens=rollout.sampling.max_new_tokens or tokens)
    return _with_spec(run, rollout=_changed(rollout, sampling=sampling))


def keep_decisions(resolved: Resolved, earlier: Mapping[str, Any]) -> Resolved:
    """Keeps the first start's decisions on resume, even if `steps` has changed since, or the model has moved."""
    spec = earlier.get("spec", {})
    run = with_new_tokens(resolved.run, spec.get("rollout", {}).get("sampling", {}).get("maxNewTokens"))
    computed = spec.get("model", {}).get("computePrecision")
    if resolved.asked.spec.model.compute_precision == "Auto" and computed is not None:
        run = _with_spec(run, model=_changed(run.spec.model, compute_precision=computed))
    precision = spec.get("model", {}).get("precision")
    if run.spec.model.precision == "Auto" and precision is not None:
        # A folder that is left to say what it is: it must be what it was then, and is checked against it.
        run = _with_spec(run, model=_changed(run.spec.model, precision=precision))
    rate = spec.get("training", {}).get("learningRate")
    if run.spec.training.learning_rate is None and rate is not None:
        run = _with_spec(run, training=_changed(run.spec.training, learning_rate=rate))
    asked = resolved.asked.spec.training.schedule
    decay = spec.get("training", {}).get("schedule", {}).get("decaySteps")
    if asked.type != "Constant" and asked.decay_steps is None and decay is not None:
        run = _with_decay(run, decay)
    return replace(resolved, run=run)


def absolute_uri(uri: str, folder: Path) -> str:
    """A path becomes absolute, `~` and `folder` written out; a URI stays as it is."""
    return uri if "://" in uri else os.path.abspath(folder / Path(uri).expanduser())


def identity_fields(run: OrbitRun) -> dict[str, Any]:
    """Path → value of every field that changes the maths, e.g. `{"spec.adapter.lora.rank": 16, …}`."""
    later = later_defaults()
    return {
        path: value
        for path, owner, value in _leaves(_decide_identity(run).to_manifest())
        if owner == "identity" and not (path in later and value == later[path])
    }


def identity_digest(run: OrbitRun, content: Mapping[str, str] = EMPTY) -> str:
    """`sha256:<hex>` over the canonical JSON of `identity_fields` and, for a run, the digests of what it reads.

    Args:
        content: name → digest, e.g. `{"content.data.prompts[0]": "sha256:…"}`.
    """
    facts = {**identity_fields(run), **content}
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[FieldDifference]:
    """Fields that differ between two manifests (`to_manifest()`), in their order, each with its set."""
    before = {path: (owner, value) for path, owner, value in _leaves(old)}
    after = {path: (owner, value) for path, owner, value in _leaves(new)}
    found, later = [], later_defaults()
    for path in {**after, **before}:
        owner, old_value = before.get(path, (None, None))
        new_owner, new_value = after.get(path, (owner, None))
        if old_value is None and path in later and new_value == later[path]:
            continue
        if type(old_value) is not type(new_value) or old_value != new_value:
            found.append(FieldDifference(path, new_owner or "identity", old_value, new_value))
    return found


def _leaves(value: Any, path: str = "", shape: str = "") -> Iterator[tuple[str, FieldSet, Any]]:
    """Path, set and value of every field. `shape` is the path with `[]` for every index."""
    owner = field_sets().get(shape)
    if owner is None and isinstance(value, Mapping):
        for name, child in value.items():
            dot = "." if path else ""
            yield from _leaves(child, f"{path}{dot}{name}", f"{shape}{dot}{name}")
    elif owner is None and isinstance(value, list):
        for index, child in enumerate(value):
            yield from _leaves(child, f"{path}[{index}]", f"{shape}[]")
    else:
        yield path, owner or "identity", value


def _decide_identity(run: OrbitRun) -> OrbitRun:
    """Decides open fields that change the maths, from the manifest alone."""
    schedule = run.spec.training.schedule
    if schedule.type != "Constant" and schedule.decay_steps is None:
        run = _with_decay(run, run.spec.training.steps)
    run = _with_spec(run, algorithm=run.spec.algorithm.decided())
    if run.spec.adapter.experts == "Auto":
        adapter = _changed(run.spec.adapter, experts=run.spec.adapter.expert_layout)
        run = _with_spec(run, adapter=adapter)
    if run.spec.model.uri.startswith("builtin://") and run.spec.model.precision == "Auto":
        run = _with_spec(run, model=_changed(run.spec.model, precision=AUTO_BUILTIN_PRECISION))
    return run


def _decide_copies(rollout: Rollout, asked: str) -> str:
    """A server that Orbit starts is a process of its own, with a base of its own."""
    if rollout.engine == "Auto":
        return asked
    return "Two" if rollout.engine == "SGLang" else "Shared"


def _decide_stop(spec: RunSpec) -> StopWhen | None:
    """`data.validation.patience` is the same in measurements."""
    validation = spec.data.validation
    if spec.training.stop_when or not validation or not validation.patience:
        return spec.training.stop_when
    return StopWhen(without_gain_steps=validation.patience * validation.every_steps)


def _decide_trainer(asked: str, machine: MachineFacts, nodes: int) -> str:
    if asked != "Auto":
        return asked
    if nodes > 1 and machine.joins_nodes:
        # Whatever this node has: the trainer is on the others.
        return "Megatron"
    return "Torch" if machine.num_gpus <= 1 else asked


def _decide_rollout(rollout: Rollout, layout: str, trainer: str) -> Rollout:
    """Args: trainer: `Auto` if the plan will decide it and the other open fields."""
    engine = rollout.engine
    if engine == "Auto" and trainer != "Auto":
        # Ranks hold no whole model that an engine could sample with.
        engine = "SGLang" if trainer == "Megatron" else "Torch"
    transport = rollout.adapter_transport
    if transport == "Auto" and engine != "Auto":
        # The memory of one container has no name in another.
        transport = "SharedMemory" if engine == "SGLang" and layout == "Colocated" else "File"
    return _changed(rollout, engine=engine, adapter_transport=transport)


def _with_decay(run: OrbitRun, steps: int) -> OrbitRun:
    schedule = _changed(run.spec.training.schedule, decay_steps=steps)
    return _with_spec(run, training=_changed(run.spec.training, schedule=schedule))


def _with_spec(run: OrbitRun, **blocks: Block) -> OrbitRun:
    return _changed(run, spec=_changed(run.spec, **blocks))


def _changed[B: Block](block: B, **fields: Any) -> B:
    return block.model_copy(update=fields)
