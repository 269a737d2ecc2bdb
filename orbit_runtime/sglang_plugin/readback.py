"""Reading LoRA slots back from SGLang's own buffers, as the files that were published.

Belongs here: the layout of SGLang's LoRA memory pool. Does not belong here: hooks (`hooks`), comparing (`parity`).

SGLang fuses q, k, v into one layer and gate, up into another. Their A matrices stand under each other, `[3r, K]` and
`[2r, K]`; their B matrices stand under each other as the layer's rows do. The scaling `alpha / r` is no tensor: it is
read from the batch that the last pass was prepared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.layer import Applied
from orbit_runtime.adapters.state import CONFIG_FILE, MODEL_FILE, PEFT_PREFIX, applied_digest, files_digest

VERSION = 1
"""Of the facts below; a client that knows another one refuses."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class Passed:
    """What the newest batch with this adapter was prepared with."""

    slot: int
    scaling: float


_passed: dict[str, Passed] = {}


def note_batch(manager: Any, forward_batch: Any) -> None:
    """Called after SGLang chose the slots of a batch: the layers of the coming pass read these."""
    batch = manager.lora_backend.batch_info
    for adapter in set(forward_batch.lora_ids) - {None}:
        slot = manager.memory_pool.get_buffer_id(adapter)
        _passed[adapter] = Passed(slot, float(batch.scalings[slot]))


def describe_adapters(manager: Any) -> dict[str, dict[str, Any]]:
    """By adapter name: where it was loaded from, digest of its slot, digest of what the newest pass applied.

    Digests are None while the adapter is in no slot, or in no batch yet. Another adapter in the slot that a batch used
    shows, because both digests are computed from the buffers' bytes.
    """
    described = {}
    for key, reference in manager.lora_refs.items():
        slot = manager.memory_pool.uid_to_buffer_id.get(key)
        passed = _passed.get(key)
        described[reference.lora_name] = {
            "path": reference.lora_path,
            "slot": slot,
            "slot_digest": None if slot is None else _slot_digest(manager, key, slot, Path(reference.lora_path)),
            "applied_digest": None if passed is None else applied_digest(_applied(manager, passed)),
        }
    for key in _passed.keys() - manager.lora_refs.keys():
        del _passed[key]
    return described


def _slot_digest(manager: Any, key: str, slot: int, folder: Path) -> str:
    """As Orbit digests the published files: equal where the slot holds what they held."""
    adapter = manager.loras[key]
    config = adapter.config
    right = config.lora_alpha / config.r
    # A scaling that is not the published one must show, and it has no tensor of its own.
    suffix = "" if adapter.scaling == right else f".scaling={adapter.scaling!r}"
    tensors = {
        f"{PEFT_PREFIX}{name}.{kind}.weight{suffix}": part for name, kind, part in _tensors(manager, slot, config.r)
    }
    files = {MODEL_FILE: tensorfile.dump_narrowed(tensors), CONFIG_FILE: (folder / CONFIG_FILE).read_bytes()}
    return files_digest(files)


def _applied(manager: Any, passed: Passed) -> list[Applied]:
    by_module: dict[str, dict[str, Tensor]] = {}
    rank = max(config.r for config in manager.configs.values())
    for name, kind, tensor in _tensors(manager, passed.slot, rank):
        by_module.setdefault(name, {})[kind] = tensor
    return [Applied(name, "", tensors, passed.scaling) for name, tensors in by_module.items()]


def _tensors(manager: Any, slot: int, rank: int) -> Iterator[tuple[str, str, Tensor]]:
    """`(module, lora_A or lora_B, tensor)` of every layer, from the buffers that the layer itself multiplies by."""
    for modules in manager.lora_modules:
        for name, module in modules.items():
            a, b = _buffers(module)
            yield from _split(name, module, a[slot], b[slot], rank)


def _buffers(module: Any) -> tuple[Tensor, Tensor]:
    if hasattr(module, "A_buffer_qkv"):
        return module.A_buffer_qkv, module.B_buffer_qkv
    return module.A_buffer, module.B_buffer


def _split(name: str, module: Any, a: Tensor, b: Tensor, rank: int) -> Iterator[tuple[str, str, Tensor]]:
    parent, _, last = name.rpartition(".")
    parts = FUSED.get(last, (last,))
    heights = _heights(module, b, len(parts))
    row = 0
    for index, (part, height) in enumerate(zip(parts, heights, strict=True)):
        yield f"{parent}.{part}", "lora_A", a[index * rank : (index + 1) * rank]
        yield f"{parent}.{part}", "lora_B", b[row : row + height, :rank]
        row += height


def _heights(module: Any, b: Tensor, count: int) -> list[int]:
    """Rows of B that belong to each of the fused projections on this rank."""
    if count == 3:
        base = module.base_layer
        query, key = base.q_proj_shard_size, base.kv_proj_shard_size
        return [query, key, key]
    return [b.shape[0] // count] * count


def names_of(files: Mapping[str, bytes]) -> list[str]:
    """Modules that an adapter's file names, for messages."""
    parsed = tensorfile.parse(files[MODEL_FILE], where=MODEL_FILE)
    return sorted({key.removeprefix(PEFT_PREFIX).rsplit(".", 2)[0] for key in parsed})
