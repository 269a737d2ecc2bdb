"""Reading slots back from the buffers that layers multiply by, as the files that were published.

Belongs here: the layout of SGLang's LoRA memory pool. Does not belong here: hooks (`hooks`), the buffers of OFT
(`rotation`), comparing (`parity`).

SGLang fuses q, k, v into one layer and gate, up into another. Their A matrices stand under each other, `[3r, K]` and
`[2r, K]`; their B matrices stand under each other as the layer's rows do. The scaling `alpha / r` is no tensor: it is
read from the batch that the last pass was prepared with. SGLang multiplies it into B of routed experts, too: divided by
the right one, that must be the published B. OFT's R stands in buffers of our own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.difference import explain_difference
from orbit_runtime.adapters.layer import Applied
from orbit_runtime.adapters.names import STACKED_NAMES
from orbit_runtime.adapters.state import (
    CONFIG_FILE,
    MODEL_FILE,
    PEFT_PREFIX,
    ROTATIONS_FILE,
    applied_digest,
    config_file,
    files_digest,
)
from orbit_runtime.sglang_plugin.experts import expert_buffers
from orbit_runtime.sglang_plugin.rotation import Published, Rotations, parts

VERSION = 2
"""Of the facts below; a client that knows another one refuses."""
EXPLAIN_FILE = "explain"
"""Put beside an adapter's files by a client that wants the difference between them and the slot in words."""


@dataclass(frozen=True, eq=False)
class Passed:
    """What the newest batch with this adapter was prepared with."""

    slot: int
    scalings: Tensor
    """Of all slots; a copy, because SGLang reuses the original for the next batch."""


Slab = tuple[str, Any, tuple[Tensor, ...]]
"""SGLang's name of a layer, the layer, and its buffers in one slot."""


@dataclass(frozen=True, eq=False)
class Taken:
    """What one adapter's digests are made of, as it stood at one moment: copies, so digesting them may take time."""

    name: str
    folder: Path
    """Where it was loaded from."""
    slot: int | None
    adapter: Any
    """SGLang's. Of it, what does not change once it is loaded."""
    held: list[Slab] | None
    """Of its slot; None: it is in none."""
    applied: list[Slab] | None
    """Of the slot that the newest batch with it was prepared with; None: there was no such batch, or nobody asks."""
    scaling: float | None
    """Of that batch; None for OFT."""
    is_shared_outer: bool
    """So routed experts are laid out."""
    suffix: str
    """What has no tensor of its own and must show, to be said in the tensors' names."""


_passed: dict[str, Passed] = {}


def note_batch(manager: Any, adapters: Iterable[str]) -> None:
    """Called after SGLang chose the slots of a batch: the layers of the coming pass read these."""
    batch = manager.lora_backend.batch_info
    named = sorted(set(adapters))
    if batch is None or not named:
        return
    scalings = batch.scalings.clone()
    for adapter in named:
        _passed[adapter] = Passed(manager.memory_pool.get_buffer_id(adapter), scalings)


def take_adapters(manager: Any, applied: Collection[str] | None = None) -> list[Taken]:
    """Copies of what stands in the slots; all that decoding has to wait for.

    Args:
        applied: names of the adapters whose newest batch is asked for; None: of all.
    """
    for key in _passed.keys() - manager.lora_refs.keys():
        del _passed[key]
    return [
        _take(manager, key, reference, applied is None or reference.lora_name in applied)
        for key, reference in manager.lora_refs.items()
    ]


def _take(manager: Any, key: str, reference: Any, with_applied: bool) -> Taken:
    slot = manager.memory_pool.uid_to_buffer_id.get(key)
    held = None if slot is None else _copies(manager, key, slot)
    passed = _passed.get(key) if with_applied else None
    applied = held if passed is not None else None
    if passed is not None and passed.slot != slot:
        applied = _copies(manager, key, passed.slot)
    adapter = manager.loras[key]
    return Taken(
        reference.lora_name, Path(reference.lora_path), slot, adapter, held, applied,
        scaling=None if passed is None or _published(adapter) else float(passed.scalings[passed.slot]),
        is_shared_outer=bool(manager.experts_shared_outer_loras),
        suffix=_suffix(manager, adapter, slot),
    )  # fmt: skip


def _suffix(manager: Any, adapter: Any, slot: int | None) -> str:
    config, rotations = adapter.config, getattr(manager, "rotations", None)
    if _published(adapter) is not None:
        return f".rank={config.r}" if config.r else ""
    right = config.lora_alpha / config.r
    suffix = "" if adapter.scaling == right else f".scaling={adapter.scaling!r}"
    if rotations is not None and slot is not None and rotations.holds[slot]:
        suffix += ".rotated"
    return suffix


def describe(taken: Iterable[Taken]) -> dict[str, dict[str, Any]]:
    """By adapter name: where it was loaded from, digest of its slot, digest of what the newest pass applied.

    Digests are None while the adapter is in no slot, or in no batch yet. Another adapter in the slot that a batch used
    shows, because both digests are computed from the buffers' bytes.
    """
    described = {}
    for each in taken:
        held = None if each.held is None else _slot_files(each, each.held)
        described[each.name] = {
            "path": str(each.folder),
            "slot": each.slot,
            "slot_digest": None if held is None else files_digest(held),
            "applied_digest": None if each.applied is None else applied_digest(_applied(each, each.applied)),
            "difference": _difference(each.folder, held) if held and (each.folder / EXPLAIN_FILE).exists() else None,
        }
    return described


def slot_tensors(manager: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """`(<module>.<kind>, tensor)` of the adapter called `name`, from the buffers that layers read."""
    for key, reference in manager.lora_refs.items():
        slot = manager.memory_pool.uid_to_buffer_id.get(key)
        if reference.lora_name == name and slot is not None:
            adapter, slabs = manager.loras[key], _slabs(manager, key, slot)
            if _published(adapter) is not None:
                yield from _rotations(slabs)
                return
            named = _tensors(adapter.config, slabs, manager.experts_shared_outer_loras)
            yield from ((f"{module}.{kind}", tensor) for module, kind, tensor in named)


def _difference(folder: Path, held: Mapping[str, bytes]) -> str:
    return explain_difference({name: (folder / name).read_bytes() for name in held}, held)


def _copies(manager: Any, key: str, slot: int) -> list[Slab]:
    return [
        (name, layer, tuple(each.clone() for each in buffers)) for name, layer, buffers in _slabs(manager, key, slot)
    ]


def _slabs(manager: Any, key: str, slot: int) -> Iterator[Slab]:
    """Of every layer; for OFT nothing where passes turn nothing by this slot."""
    rotations: Rotations | None = getattr(manager, "rotations", None)
    if rotations is not None and _published(manager.loras[key]) is not None:
        if rotations.holds[slot]:
            for name, layer in rotations.layers.items():
                yield name, layer, (layer.buffer[slot],)
        return
    for modules in manager.lora_modules:
        for name, module in modules.items():
            is_of_experts = hasattr(module, "gate_up_lora_a_weights")
            buffers = expert_buffers(module) if is_of_experts else _buffers(module)
            yield name, module, tuple(buffer[slot] for buffer in buffers)


def _slot_files(taken: Taken, held: Iterable[Slab]) -> dict[str, bytes]:
    """The published files, rebuilt: equal where the slot holds what they held."""
    config, published = taken.adapter.config, _published(taken.adapter)
    settings = config_file(config.hf_config) if config.path is None else (taken.folder / CONFIG_FILE).read_bytes()
    if published is not None:
        return {
            MODEL_FILE: tensorfile.dump(published.parameters, torch.float32),
            ROTATIONS_FILE: tensorfile.dump_narrowed({f"{name}{taken.suffix}": R for name, R in _rotations(held)}),
            CONFIG_FILE: settings,
        }
    named = _tensors(config, held, taken.is_shared_outer)
    tensors = {f"{PEFT_PREFIX}{name}.{kind}.weight{taken.suffix}": part for name, kind, part in named}
    return {MODEL_FILE: tensorfile.dump_narrowed(tensors), CONFIG_FILE: settings}


def _applied(taken: Taken, applied: Iterable[Slab]) -> list[Applied]:
    if _published(taken.adapter) is not None:
        return [Applied(name, "", {name: R}, None) for name, R in _rotations(applied)]
    by_module: dict[str, dict[str, Tensor]] = {}
    for name, kind, tensor in _tensors(taken.adapter.config, applied, taken.is_shared_outer):
        by_module.setdefault(name, {})[f"{name}.{kind}"] = tensor
    return [Applied(name, "", tensors, taken.scaling) for name, tensors in by_module.items()]


def _published(adapter: Any) -> Published | None:
    """What it brought besides SGLang's tensors; None: it is a LoRA."""
    found: Published | None = getattr(adapter, "published", None)
    return found


def _rotations(slabs: Iterable[Slab]) -> Iterator[tuple[str, Tensor]]:
    """R of every layer under its name in files."""
    for _, layer, (R,) in slabs:
        yield from layer.named(R)


def _tensors(config: Any, slabs: Iterable[Slab], is_shared_outer: bool) -> Iterator[tuple[str, str, Tensor]]:
    """`(module, lora_A or lora_B, tensor)` of every layer, from what the layer itself multiplies by."""
    for name, module, buffers in slabs:
        if len(buffers) == 2:
            yield from _split(name, module, *buffers, config.r)
        else:
            yield from _split_experts(name, buffers, config.r, config.lora_alpha / config.r, is_shared_outer)


def _split_experts(
    name: str, buffers: Sequence[Tensor], rank: int, scaling: float, is_shared_outer: bool
) -> Iterator[tuple[str, str, Tensor]]:
    """SGLang leaves room for its largest rank between gate and up."""
    up_A, up_B, down_A, down_B = buffers
    (gate_A, up_A), (gate_B, up_B) = up_A.chunk(2, 1), up_B.chunk(2, 1)
    for part, A, B in (("gate_proj", gate_A, gate_B), ("up_proj", up_A, up_B), ("down_proj", down_A, down_B)):
        A_ErK, B_ENr = A[:, :rank], B[..., :rank] / scaling
        if is_shared_outer:
            yield f"{name}.{STACKED_NAMES[part]}", "lora_A", A_ErK
            yield f"{name}.{STACKED_NAMES[part]}", "lora_B", B_ENr
            continue
        for expert, (A_rK, B_Nr) in enumerate(zip(A_ErK, B_ENr, strict=True)):
            yield f"{name}.{expert}.{part}", "lora_A", A_rK
            yield f"{name}.{expert}.{part}", "lora_B", B_Nr


def _buffers(module: Any) -> tuple[Tensor, Tensor]:
    if hasattr(module, "A_buffer_qkv"):
        return module.A_buffer_qkv, module.B_buffer_qkv
    return module.A_buffer, module.B_buffer


def _split(name: str, module: Any, a: Tensor, b: Tensor, rank: int) -> Iterator[tuple[str, str, Tensor]]:
    names = parts(name)
    row = 0
    for index, (part, height) in enumerate(zip(names, _heights(module, b, len(names)), strict=True)):
        yield part, "lora_A", a[index * rank : (index + 1) * rank]
        yield part, "lora_B", b[row : row + height, :rank]
        row += height


def _heights(module: Any, b: Tensor, count: int) -> list[int]:
    """Rows of B that belong to each of the fused projections on this rank."""
    if count == 3:
        base = module.base_layer
        query, key = base.q_proj_shard_size, base.kv_proj_shard_size
        return [query, key, key]
    first = getattr(module, "first_output_dim", 0)
    if first:
        return [first, b.shape[0] - first]
    return [b.shape[0] // count] * count
