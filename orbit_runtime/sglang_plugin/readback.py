"""Reads slots back from the buffers that layers multiply by, in the form of the published files.

Belongs here: the layout of SGLang's LoRA memory pool. Does not belong here: hooks (`hooks`), the buffers of OFT
(`rotation`), joining ranks (`shards`), comparing (`parity`).

SGLang fuses q, k, v into one layer and gate, up into another. Their A matrices are stacked, `[3r, K]` and `[2r, K]`;
their B matrices are stacked like the layer's rows. The scaling `alpha / r` is not a tensor: it is read from the batch
that the last pass was prepared with. For routed experts SGLang also multiplies it into B: divided by the correct
scaling, that must be the published B. OFT's R is kept in buffers of our own, whole on every rank.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.buffer import MemoryOpening
from orbit_runtime.adapters.files import (
    CONFIG_FILE,
    MODEL_FILE,
    PEFT_PREFIX,
    ROTATIONS_FILE,
    STACKED_NAMES,
    digest_applied,
)
from orbit_runtime.adapters.state import config_file, explain_difference, held_digest, published_tensors
from orbit_runtime.digests import Pieces
from orbit_runtime.sglang_plugin.experts import expert_buffers
from orbit_runtime.sglang_plugin.ranks import are_on_one_machine, count, own_rank
from orbit_runtime.sglang_plugin.rotation import OFTFiles, RotationTable, parts
from orbit_runtime.sglang_plugin.shards import (
    ShardPiece,
    SharedTensor,
    SplitTensor,
    borrow,
    join,
    lend,
    pack,
    with_pieces,
)
from orbit_runtime.sglang_plugin.weights import HeldTensor, name_in_files
from orbit_runtime.workers.servers.protocol import EXPLAIN_FILE


@dataclass(frozen=True, eq=False)
class PreparedBatch:
    """The preparation of the newest batch with this adapter."""

    slot: int
    scalings: Tensor
    """Scalings of all slots; a copy, because SGLang reuses the original for the next batch."""


Slab = tuple[str, Any, tuple[Tensor, ...]]
"""SGLang's name of a layer, the layer, and its buffers in one slot."""


@dataclass(frozen=True, eq=False)
class HeldAdapter:
    """The source of one adapter's digests, as this rank held it at one moment."""

    name: str
    folder: Path
    """The folder it was loaded from."""
    adapter: Any
    """SGLang's adapter; only attributes that do not change after loading are used."""
    slot: int | None
    """The adapter's slot; None if it has none."""
    passed: int | None
    """The slot that the newest batch with it used; None if there was none yet, or it was not requested."""
    scaling: float | None
    """Scaling of that batch; OFT has none."""
    mark: str
    """Mark of the slot: a deviation that no tensor shows."""
    is_shared_outer: bool
    """Whether routed experts use this layout."""
    slabs: Mapping[int, Sequence[Slab]]
    """Slabs by slot."""


@dataclass(frozen=True, eq=False)
class RankReport:
    """The part of `HeldAdapter` that other ranks need."""

    slot: int | None
    passed: int | None
    scaling: float | None
    mark: str
    pieces: Mapping[int, Sequence[ShardPiece]]
    """Pieces by slot."""
    opening: MemoryOpening | None = None
    """The memory of these pieces' values, if rank 0 may map it."""


_NAMED: dict[tuple[str, str], Any] = {
    **{("torch", str(each).removeprefix("torch.")): each for each in vars(torch).values() if type(each) is torch.dtype},
    **{
        (each.__module__, each.__name__): each
        for each in (RankReport, ShardPiece, SharedTensor, MemoryOpening, OrderedDict, torch._utils._rebuild_tensor_v2)
    },
    ("torch.storage", "_load_from_bytes"): lambda data: torch.load(io.BytesIO(data), weights_only=True),
}


class ReportReader(pickle.Unpickler):
    """Reads the reports of another rank from a file; whoever wrote it, nothing is called but what reports name."""

    def find_class(self, module: str, name: str) -> Any:
        return _NAMED[module, name]


_passed: dict[str, PreparedBatch] = {}


def note_batch(manager: Any, adapters: Iterable[str]) -> None:
    """Call after SGLang chose the slots of a batch, which the layers of the coming pass read."""
    batch = manager.lora_backend.batch_info
    named = sorted(set(adapters))
    if batch is None or not named:
        return
    scalings = batch.scalings.clone()
    for adapter in named:
        _passed[adapter] = PreparedBatch(manager.memory_pool.get_buffer_id(adapter), scalings)


def take_adapters(
    manager: Any, names: Collection[str] | None = None, standing: Collection[str] = (), *, copied: bool = True
) -> list[HeldAdapter]:
    """The adapters in the slots of this rank; the only part that decoding has to wait for.

    Args:
        names: the requested adapters; None for all.
        standing: further adapters, whose newest batch is not requested.
        copied: copies the buffers, so that they can be digested while the slots change.
    """
    for key in _passed.keys() - manager.lora_refs.keys():
        del _passed[key]
    adapters = []
    for key, reference in manager.lora_refs.items():
        is_asked = names is None or reference.lora_name in names
        if not is_asked and reference.lora_name not in standing:
            continue
        adapter, slot = manager.loras[key], manager.memory_pool.uid_to_buffer_id.get(key)
        passed = _passed.get(key) if is_asked else None
        used = {slot, passed.slot if passed else None} - {None}
        slabs = {each: list(_slabs(manager, adapter, each)) for each in used}
        if copied:
            slabs = {each: _copies(held) for each, held in slabs.items()}
        adapters.append(HeldAdapter(
            reference.lora_name, Path(reference.lora_path), adapter, slot, passed.slot if passed else None,
            scaling=float(passed.scalings[passed.slot]) if passed and _published(adapter) is None else None,
            mark="" if slot is None else _mark(manager, adapter, slot),
            is_shared_outer=bool(manager.experts_shared_outer_loras), slabs=slabs,
        ))  # fmt: skip
    return adapters


def report_adapters(adapters: Iterable[HeldAdapter], *, is_alone: bool) -> dict[str, RankReport]:
    """Reports by adapter name.

    Args:
        is_alone: there is no other rank. Of several, all but the first send theirs.
    """
    reports = {}
    for each in adapters:
        pieces = {slot: list(_pieces(each, slabs, is_alone=is_alone)) for slot, slabs in each.slabs.items()}
        opening = None
        if not is_alone and own_rank():
            whole, lends = (each.folder / EXPLAIN_FILE).exists(), are_on_one_machine()
            pieces = {slot: pack(held, whole=whole, copied=not lends) for slot, held in pieces.items()}
            if lends:
                pieces, opening = lend(pieces)
        reports[each.name] = RankReport(each.slot, each.passed, each.scaling, each.mark, pieces, opening)
    return reports


def receive_reports(reports: Mapping[str, RankReport]) -> dict[str, RankReport]:
    """Another rank's reports with their values; call it at once.

    Raises:
        OSError: the memory that holds them is gone.
    """
    return {
        name: replace(each, pieces=borrow(each.pieces, each.opening), opening=None) for name, each in reports.items()
    }


def describe(adapters: Iterable[HeldAdapter], ranks: Sequence[Mapping[str, RankReport]]) -> dict[str, dict[str, Any]]:
    """By adapter name: the folder it was loaded from, digest of its slots, digest of what the newest pass applied.

    A digest is None if the adapter is in no slot, or in no batch yet. Another adapter in the slot that a batch used is
    detected, because both digests are computed from the buffers' bytes; so is a rank that holds something else.

    Args:
        adapters: those of rank 0.
        ranks: the reports of every rank, in order.
    """
    described = {}
    for each in adapters:
        reports = [rank.get(each.name) for rank in ranks]
        standing = _joined(reports, [rank and rank.slot for rank in reports])
        # Normally the newest batch used the adapter's current slot.
        is_same = all(rank is None or rank.passed == rank.slot for rank in reports)
        applied = standing if is_same else _joined(reports, [rank and rank.passed for rank in reports])
        # Normally one pass over the buffers serves both digests.
        pieces = _hashed(standing)
        used = pieces if applied is standing else _hashed(applied)
        explained = each.slot is not None and (each.folder / EXPLAIN_FILE).exists()
        described[each.name] = {
            "path": str(each.folder),
            "slot": each.slot,
            "slot_digest": None if each.slot is None else _slot_digest(each, reports, standing, pieces),
            "applied_digest": None if each.passed is None else _applied_digest(reports, applied, used),
            "difference": _difference(each.folder, _slot_files(each, reports, standing), reports)
            if explained
            else None,
        }
    return described


def slot_tensors(manager: Any, name: str) -> Iterator[HeldTensor]:
    """This rank's parts of the adapter called `name`, as `<module>.<kind>`, from the buffers that layers read."""
    is_alone = count() == 1
    for each in take_adapters(manager, (name,), copied=True):
        if each.slot is not None:
            for piece in _pieces(each, each.slabs[each.slot], is_alone=is_alone):
                assert isinstance(piece.data, Tensor)
                axis = piece.axis or 0
                start = piece.part * piece.data.shape[axis]
                yield HeldTensor(piece.name, partial(_same, piece.data), axis, start if piece.axis is not None else 0)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _difference(folder: Path, held: Mapping[str, bytes], reports: Sequence[RankReport | None]) -> str:
    """The differences of each rank in turn, if there are several."""
    published = {name: (folder / name).read_bytes() for name in held}
    if len(reports) == 1:
        return explain_difference(published, held)
    file = ROTATIONS_FILE if ROTATIONS_FILE in held else MODEL_FILE
    tensors = published_tensors(published)
    ranks = [each.pieces.get(each.slot, ()) if each and each.slot is not None else () for each in reports]
    differences = []
    for rank in range(len(ranks)):
        found = with_pieces(tensors, ranks, rank)
        if found is not None:
            plain = {file: tensorfile.dump_narrowed(tensors)}
            differences.append(f"rank {rank}: {explain_difference(plain, {file: tensorfile.dump_narrowed(found)})}")
    return "; ".join(differences) or explain_difference(published, held)


def _hashed(tensors: Mapping[str, SplitTensor]) -> dict[str, Pieces]:
    return tensorfile.tensor_pieces((name, each.whole()) for name, each in tensors.items())


def _joined(reports: Sequence[RankReport | None], slots: Sequence[int | None]) -> Mapping[str, SplitTensor]:
    """The contents of these slots, one per rank, joined over all ranks; None for a rank where it is in no slot."""
    pieces = [
        () if each is None or slot is None else each.pieces.get(slot, ())
        for each, slot in zip(reports, slots, strict=True)
    ]
    return join(pieces)


def _slot_digest(
    adapter: HeldAdapter,
    reports: Sequence[RankReport | None],
    held: Mapping[str, SplitTensor],
    pieces: Mapping[str, Pieces],
) -> str:
    """Digest of what the slots of all ranks hold: the published digest if that is what was published.

    Deviations that no tensor shows are added to the tensors' names.
    """
    suffix, published = _suffix(reports), _published(adapter.adapter)
    frame = "{}" + suffix if published is not None else f"{PEFT_PREFIX}{{}}.weight{suffix}"
    return held_digest(
        _settings(adapter),
        {frame.format(name): each.shape for name, each in held.items()},
        {frame.format(name): each for name, each in pieces.items()},
        parameters=None if published is None else published.parameters,
    )


def _suffix(reports: Sequence[RankReport | None]) -> str:
    return "".join(sorted({each.mark for each in reports if each}))


def _settings(adapter: HeldAdapter) -> bytes:
    config = adapter.adapter.config
    return config_file(config.hf_config) if config.path is None else (adapter.folder / CONFIG_FILE).read_bytes()


def _slot_files(
    adapter: HeldAdapter, reports: Sequence[RankReport | None], held: Mapping[str, SplitTensor]
) -> dict[str, bytes]:
    """The published files, rebuilt in order to describe how they differ."""
    published, settings, suffix = _published(adapter.adapter), _settings(adapter), _suffix(reports)
    if published is not None:
        return {
            MODEL_FILE: tensorfile.dump(published.parameters, torch.float32),
            ROTATIONS_FILE: tensorfile.dump_narrowed({f"{name}{suffix}": R.whole() for name, R in held.items()}),
            CONFIG_FILE: settings,
        }
    tensors = {f"{PEFT_PREFIX}{name}.weight{suffix}": part.whole() for name, part in held.items()}
    return {MODEL_FILE: tensorfile.dump_narrowed(tensors), CONFIG_FILE: settings}


def _applied_digest(
    reports: Sequence[RankReport | None], tensors: Mapping[str, SplitTensor], pieces: Mapping[str, Pieces]
) -> str:
    return digest_applied(
        {name: each.shape for name, each in tensors.items()}, pieces, {each.scaling for each in reports if each}
    )


def _mark(manager: Any, adapter: Any, slot: int) -> str:
    config, rotations = adapter.config, getattr(manager, "rotations", None)
    if _published(adapter) is not None:
        return f".rank={config.r}" if config.r else ""
    right = config.lora_alpha / config.r
    mark = "" if adapter.scaling == right else f".scaling={adapter.scaling!r}"
    return f"{mark}.rotated" if rotations is not None and rotations.holds[slot] else mark


def _published(adapter: Any) -> OFTFiles | None:
    """OFT's values besides SGLang's tensors; None for LoRA."""
    found: OFTFiles | None = getattr(adapter, "published", None)
    return found


def _slabs(manager: Any, adapter: Any, slot: int) -> Iterator[Slab]:
    """For every layer, the buffers that it multiplies by; for OFT nothing if passes rotate nothing with this slot."""
    rotations: RotationTable | None = getattr(manager, "rotations", None)
    if rotations is not None and _published(adapter) is not None:
        if rotations.holds[slot]:
            for name, layer in rotations.layers.items():
                yield name, layer, (layer.buffer[slot],)
        return
    for modules in manager.lora_modules:
        for name, module in modules.items():
            is_of_experts = hasattr(module, "gate_up_lora_a_weights")
            buffers = expert_buffers(module) if is_of_experts else _buffers(module)
            yield name_in_files(name), module, tuple(buffer[slot] for buffer in buffers)


def _copies(slabs: Iterable[Slab]) -> list[Slab]:
    return [(name, layer, tuple(each.clone() for each in buffers)) for name, layer, buffers in slabs]


def _pieces(adapter: HeldAdapter, slabs: Iterable[Slab], *, is_alone: bool) -> Iterator[ShardPiece]:
    """Pieces of every layer, by their names in files."""
    config = adapter.adapter.config
    for name, layer, buffers in slabs:
        if len(buffers) == 1:
            is_copy = not is_alone and own_rank() > 0
            yield from (ShardPiece(each, R, is_copy=is_copy) for each, R in layer.named(*buffers))
        elif len(buffers) == 2:
            yield from _split(name, layer, *buffers, config.r, is_alone=is_alone)
        else:
            scaling, place = config.lora_alpha / config.r, None if is_alone else layer.tp_rank
            yield from _split_experts(name, buffers, config.r, scaling, adapter.is_shared_outer, place)


def _split_experts(
    name: str, buffers: Sequence[Tensor], rank: int, scaling: float, is_shared_outer: bool, place: int | None
) -> Iterator[ShardPiece]:
    """Splits gate and up, between which SGLang reserves room for its largest rank.

    Args:
        place: index of this rank's part of the experts' inner width; None for all of it.
    """
    up_A, up_B, down_A, down_B = buffers
    (gate_A, up_A), (gate_B, up_B) = up_A.chunk(2, 1), up_B.chunk(2, 1)
    for part, A, B in (("gate_proj", gate_A, gate_B), ("up_proj", up_A, up_B), ("down_proj", down_A, down_B)):
        A_ErK, B_ENr = A[:, :rank], B[..., :rank] / scaling
        # When stacked, the experts' axis precedes the others.
        first = 1 if is_shared_outer else 0
        cut_A, cut_B = (first + 1, None) if part == "down_proj" else (None, first)
        if place is None:
            cut_A = cut_B = None
        if is_shared_outer:
            yield _piece(f"{name}.{STACKED_NAMES[part]}.lora_A", A_ErK, cut_A, place)
            yield _piece(f"{name}.{STACKED_NAMES[part]}.lora_B", B_ENr, cut_B, place)
            continue
        for expert, (A_rK, B_Nr) in enumerate(zip(A_ErK, B_ENr, strict=True)):
            yield _piece(f"{name}.{expert}.{part}.lora_A", A_rK, cut_A, place)
            yield _piece(f"{name}.{expert}.{part}.lora_B", B_Nr, cut_B, place)


def _piece(name: str, data: Tensor, axis: int | None, place: int | None, copies: int = 1) -> ShardPiece:
    """Args: copies: number of neighbouring ranks that hold the same part."""
    place = place or 0
    if axis is None:
        return ShardPiece(name, data, is_copy=place > 0)
    return ShardPiece(name, data, axis, place // copies, place % copies > 0)


def _buffers(module: Any) -> tuple[Tensor, Tensor]:
    if hasattr(module, "A_buffer_qkv"):
        return module.A_buffer_qkv, module.B_buffer_qkv
    return module.A_buffer, module.B_buffer


def _split(name: str, module: Any, a: Tensor, b: Tensor, rank: int, *, is_alone: bool) -> Iterator[ShardPiece]:
    names = parts(name)
    place, cut_A, cut_B = (0, None, None) if is_alone else _cut(module)
    row = 0
    for index, (part, height) in enumerate(zip(names, _heights(module, b, len(names)), strict=True)):
        # With fewer key/value heads than ranks, neighbours share one.
        copies = module.base_layer.num_kv_head_replicas if cut_B is not None and len(names) == 3 and index else 1
        yield _piece(f"{part}.lora_A", a[index * rank : (index + 1) * rank], cut_A, place)
        yield _piece(f"{part}.lora_B", b[row : row + height, :rank], cut_B, place, copies)
        row += height


def _cut(module: Any) -> tuple[int, int | None, int | None]:
    """The index of this rank's part of the layer, and the axes along which its A and B are divided; None: whole."""
    from sglang.srt.distributed.utils import get_group_rank_size
    from sglang.srt.lora.layers import ReplicatedLinearWithLoRA, RowParallelLinearWithLoRA

    if isinstance(module, ReplicatedLinearWithLoRA):
        return own_rank(), None, None
    place, size = get_group_rank_size(module.base_layer.tp_group)
    if size == 1:
        return own_rank(), None, None
    return (place, 1, None) if isinstance(module, RowParallelLinearWithLoRA) else (place, None, 0)


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
