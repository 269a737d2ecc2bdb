"""The parts of an adapter on the ranks of one server, and the whole tensors that they form.

SGLang divides an adapter along with its base: B of a column-parallel layer by rows, A of a row-parallel one by columns;
the other factor, and OFT's R, are whole on every rank. A rank that holds a copy of a lower rank's part sends its
digest. Values are lent to rank 0 in memory that both map: nothing of them is sent.

Belongs here: pieces, that memory and how long it is kept, joining pieces, naming the ranks that differ. Does not belong
here: the part that a layer has (`readback`), sending the rest of a report (`ranks`, `taps`), SGLang.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from orbit_runtime.adapters.buffer import AdapterBuffer, MemoryOpening, opened, opening_of, write_place
from orbit_runtime.adapters.tensorfile import tensor_digest


@dataclass(frozen=True, eq=False)
class ShardPiece:
    """One rank's part of one tensor."""

    name: str
    """`<module>.<kind>`, as in files without prefix and ending."""
    data: Tensor | SharedTensor | str
    """Values in any dtype, where another process's values lie, or their digest."""
    axis: int | None = None
    """Axis along which the tensor is divided over ranks, in equal parts; None if it is whole here."""
    part: int = 0
    """Index of the part."""
    is_copy: bool = False
    """Whether a lower rank holds this part too."""


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor in memory that another process of this machine maps."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False, slots=True)
class SplitTensor:
    """A tensor whose parts several ranks hold; it exists as one only while it is used."""

    parts: tuple[Tensor, ...]
    axis: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        if self.axis is None:
            return tuple(first)
        return (*first[: self.axis], sum(each.shape[self.axis] for each in self.parts), *first[self.axis + 1 :])

    def whole(self) -> Tensor:
        if self.axis is None or len(self.parts) == 1:
            return self.parts[0]
        # This rank's part may lie on its device; the others' came through main memory.
        return torch.cat([each.cpu() for each in self.parts], self.axis)


def pack(pieces: Iterable[ShardPiece], *, whole: bool, copied: bool = True) -> list[ShardPiece]:
    """Prepares pieces for sending.

    Args:
        whole: keeps the values of copies too, so that they can be compared.
        copied: puts values into host memory, in storage of their own.
    """
    given = list(pieces)
    hashed = [each.is_copy and not whole for each in given]
    digests = iter(_digests([each.data for each, is_hashed in zip(given, hashed, strict=True) if is_hashed]))
    return [
        replace(each, data=next(digests) if is_hashed else _own(each.data) if copied else each.data)
        for each, is_hashed in zip(given, hashed, strict=True)
    ]


def join(ranks: Sequence[Sequence[ShardPiece]]) -> dict[str, SplitTensor]:
    """Tensors by name. A part that two ranks hold differently, or one lacks, changes the name, which then matches
    nothing published.

    Args:
        ranks: the pieces of every rank, in order.
    """
    held: dict[str, dict[int, Tensor]] = {}
    for piece in (each for pieces in ranks for each in pieces):
        if not piece.is_copy and isinstance(piece.data, Tensor):
            held.setdefault(piece.name, {})[piece.part] = piece.data
    # What several ranks hold, which is compared by digest.
    shared = {(each.name, each.part) for pieces in ranks for each in pieces if each.is_copy}
    digests = dict(zip(shared, _digests([held.get(name, {}).get(part, "") for name, part in shared]), strict=True))
    wrong = {name: set(range(len(ranks))) for name in held}
    axes = {}
    for rank, pieces in enumerate(ranks):
        for piece in pieces:
            axes[piece.name] = piece.axis
            first, key = held.get(piece.name, {}).get(piece.part), (piece.name, piece.part)
            if first is None:
                continue
            if first is piece.data or (digests.get(key) or _digest(first)) == _digest(piece.data):
                wrong[piece.name].discard(rank)
    joined = {}
    for name, parts in held.items():
        mark = "".join(f".rank={rank}" for rank in sorted(wrong[name]))
        joined[name + mark] = SplitTensor(tuple(parts[part] for part in sorted(parts)), axes[name])
    return joined


def with_pieces(
    published: Mapping[str, Tensor], ranks: Sequence[Sequence[ShardPiece]], rank: int
) -> dict[str, Tensor] | None:
    """The published tensors with this rank's parts substituted; None if that changes nothing.

    A tensor that the rank lacks is left out; one that does not fit the published tensor is kept as it is.
    """
    counts: dict[str, int] = {}
    for piece in (each for pieces in ranks for each in pieces):
        counts[piece.name] = max(counts.get(piece.name, 1), piece.part + 1)
    found, changed = {}, len(ranks[rank]) != len(published)
    for piece in ranks[rank]:
        if piece.name not in published or not isinstance(piece.data, Tensor):
            changed = changed or piece.name not in published
            continue
        whole = published[piece.name].to(piece.data.dtype).clone()
        place = whole if piece.axis is None else whole.chunk(counts[piece.name], piece.axis)[piece.part]
        values = piece.data.cpu()
        if place.shape != values.shape:
            found[piece.name], changed = values, True
            continue
        changed = changed or not torch.equal(place, values)
        place.copy_(values)
        found[piece.name] = whole
    return found if changed else None


def _digest(data: Tensor | SharedTensor | str) -> str:
    return tensor_digest(data) if isinstance(data, Tensor) else str(data)


def _digests(given: Sequence[Tensor | SharedTensor | str]) -> list[str]:
    """Hashing lets other threads run meanwhile."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(_digest, given))


def _own(data: Tensor | SharedTensor | str) -> Tensor | SharedTensor | str:
    # A pickled view would include its whole buffer.
    return data.detach().cpu().clone(memory_format=torch.contiguous_format) if isinstance(data, Tensor) else data


KEPT_SECONDS = 600.0
"""Seconds after which memory that nobody opened is released."""
_ALIGNMENT = 64
_OPENED = b"\1"
"""Value of the first byte once rank 0 maps the memory, whose owner may then release it."""
Reports = Mapping[int, Sequence[ShardPiece]]
"""Pieces by slot."""

_kept: list[tuple[float, AdapterBuffer]] = []
_lock = threading.Lock()


def lend(slots: Reports) -> tuple[dict[int, list[ShardPiece]], MemoryOpening | None]:
    """The pieces without their values, and where these lie; None if there are none."""
    tensors = [each.data for pieces in slots.values() for each in pieces if isinstance(each.data, Tensor)]
    sizes = [-(-each.numel() * each.element_size() // _ALIGNMENT) * _ALIGNMENT for each in tensors]
    _give_back()
    if not sum(sizes):
        return {slot: list(pieces) for slot, pieces in slots.items()}, None
    memory = AdapterBuffer()
    position = memory.reserve("pieces", _ALIGNMENT + sum(sizes)) + _ALIGNMENT
    lent: dict[int, SharedTensor] = {}
    for tensor, size in zip(tensors, sizes, strict=True):
        if size:
            values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            write_place(memory.descriptor, memoryview(values.numpy()), position, position + size)
        lent[id(tensor)] = SharedTensor(position, tuple(tensor.shape), tensor.dtype)
        position += size
    with _lock:
        _kept.append((time.monotonic(), memory))
    named = {
        slot: [replace(each, data=lent.get(id(each.data), each.data)) for each in pieces]
        for slot, pieces in slots.items()
    }
    return named, opening_of(memory)


def borrow(slots: Reports, opening: MemoryOpening | None) -> dict[int, list[ShardPiece]]:
    """The inverse of `lend`, without copying; the memory lives as long as any of the tensors.

    Raises:
        OSError: the memory is gone, or another machine's.
    """
    if opening is None:
        return {slot: list(pieces) for slot, pieces in slots.items()}
    with opened(opening, os.O_RDWR) as descriptor:
        mapped = mmap.mmap(descriptor, os.fstat(descriptor).st_size, access=mmap.ACCESS_COPY)
        os.pwrite(descriptor, _OPENED, 0)
    take = partial(_take, mapped)
    return {slot: [replace(each, data=take(each.data)) for each in pieces] for slot, pieces in slots.items()}


def _give_back() -> None:
    with _lock:
        _kept[:] = [(since, each) for since, each in _kept if not _is_over(since, each)]


def _is_over(since: float, memory: AdapterBuffer) -> bool:
    return os.pread(memory.descriptor, 1, 0) == _OPENED or time.monotonic() - since > KEPT_SECONDS


def _take(mapped: mmap.mmap, data: Tensor | SharedTensor | str) -> Tensor | SharedTensor | str:
    if not isinstance(data, SharedTensor):
        return data
    if not math.prod(data.shape):
        return torch.empty(data.shape, dtype=data.dtype)
    flat = torch.frombuffer(mapped, dtype=data.dtype, count=math.prod(data.shape), offset=data.start)
    return flat.view(data.shape)
