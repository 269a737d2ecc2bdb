"""Reading slots back from the buffers that layers multiply by, as the files that were published.

Belongs here: the layout of SGLang's LoRA memory pool. Does not belong here: hooks (`hooks`), the buffers of OFT
(`rotation`), comparing (`parity`).

SGLang fuses q, k, v into one layer and gate, up into another. Their A matrices stand under each other, `[3r, K]` and
`[2r, K]`; their B matrices stand under each other as the layer's rows do. The scaling `alpha / r` is no tensor: it is
read from the batch that the last pass was prepared with. SGLang multiplies it into B of routed experts, too: divided by
the right one, that must be the published B. OFT's R stands in buffers of our own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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


def describe_adapters(manager: Any) -> dict[str, dict[str, Any]]:
    """By adapter name: where it was loaded from, digest of its slot, digest of what the newest pass applied.

    Digests are None while the adapter is in no slot, or in no batch yet. Another adapter in the slot that a batch used
    shows, because both digests are computed from the buffers' bytes.
    """
    described = {}
    for key, reference in manager.lora_refs.items():
        slot = manager.memory_pool.uid_to_buffer_id.get(key)
        passed = _passed.get(key)
        folder = Path(reference.lora_path)
        held = None if slot is None else _slot_files(manager, key, slot, folder)
        described[reference.lora_name] = {
            "path": reference.lora_path,
            "slot": slot,
            "slot_digest": None if held is None else files_digest(held),
            "applied_digest": None if passed is None else applied_digest(_applied(manager, key, passed)),
            "difference": _difference(folder, held) if held and (folder / EXPLAIN_FILE).exists() else None,
        }
    for key in _passed.keys() - manager.lora_refs.keys():
        del _passed[key]
    return described


def slot_tensors(manager: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """`(<module>.<kind>, tensor)` of the adapter called `name`, from the buffers that layers read."""
    for key, reference in manager.lora_refs.items():
        slot = manager.memory_pool.uid_to_buffer_id.get(key)
        if reference.lora_name == name and slot is not None:
            published, rotations = _oft(manager, key)
            if published is not None and rotations is not None:
                yield from _rotations(rotations, slot)
                return
            yield from ((f"{module}.{kind}", tensor) for module, kind, tensor in _tensors(manager, slot, key))


def _difference(folder: Path, held: Mapping[str, bytes]) -> str:
    return explain_difference({name: (folder / name).read_bytes() for name in held}, held)


def _slot_files(manager: Any, key: str, slot: int, folder: Path) -> dict[str, bytes]:
    """The published files, rebuilt: equal where the slot holds what they held.

    What has no tensor of its own and must show, is said in the tensors' names.
    """
    adapter, config = manager.loras[key], manager.loras[key].config
    published, rotations = _oft(manager, key)
    settings = config_file(config.hf_config) if config.path is None else (folder / CONFIG_FILE).read_bytes()
    if published is not None and rotations is not None:
        suffix = f".rank={config.r}" if config.r else ""
        turned = {f"{name}{suffix}": R for name, R in _rotations(rotations, slot)}
        return {
            MODEL_FILE: tensorfile.dump(published.parameters, torch.float32),
            ROTATIONS_FILE: tensorfile.dump_narrowed(turned),
            CONFIG_FILE: settings,
        }
    right = config.lora_alpha / config.r
    suffix = "" if adapter.scaling == right else f".scaling={adapter.scaling!r}"
    if rotations is not None and rotations.holds[slot]:
        suffix += ".rotated"
    tensors = {f"{PEFT_PREFIX}{name}.{kind}.weight{suffix}": part for name, kind, part in _tensors(manager, slot, key)}
    return {MODEL_FILE: tensorfile.dump_narrowed(tensors), CONFIG_FILE: settings}


def _applied(manager: Any, key: str, passed: Passed) -> list[Applied]:
    published, rotations = _oft(manager, key)
    if published is not None and rotations is not None:
        return [Applied(name, "", {name: R}, None) for name, R in _rotations(rotations, passed.slot)]
    by_module: dict[str, dict[str, Tensor]] = {}
    for name, kind, tensor in _tensors(manager, passed.slot, key):
        by_module.setdefault(name, {})[f"{name}.{kind}"] = tensor
    scaling = float(passed.scalings[passed.slot])
    return [Applied(name, "", tensors, scaling) for name, tensors in by_module.items()]


def _oft(manager: Any, key: str) -> tuple[Published | None, Rotations | None]:
    return getattr(manager.loras[key], "published", None), getattr(manager, "rotations", None)


def _rotations(rotations: Rotations, slot: int) -> Iterator[tuple[str, Tensor]]:
    """R of every layer under its name in files; nothing where passes turn nothing by this slot."""
    if rotations.holds[slot]:
        for layer in rotations.layers.values():
            yield from layer.held(slot)


def _tensors(manager: Any, slot: int, key: str) -> Iterator[tuple[str, str, Tensor]]:
    """`(module, lora_A or lora_B, tensor)` of every layer, from the buffers that the layer itself multiplies by."""
    config = manager.loras[key].config
    for modules in manager.lora_modules:
        for name, module in modules.items():
            if hasattr(module, "gate_up_lora_a_weights"):
                scaling = config.lora_alpha / config.r
                buffers = [buffer[slot] for buffer in expert_buffers(module)]
                yield from _split_experts(name, buffers, config.r, scaling, manager.experts_shared_outer_loras)
                continue
            a, b = _buffers(module)
            yield from _split(name, module, a[slot], b[slot], config.r)


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
