"""Tensors that the ranks of one server lend to rank 0, in memory that both map: nothing of them is sent.

Belongs here: that memory, and how long it is kept. Does not belong here: which tensors (`shards`, `readback`), sending
the rest of a report (`ranks`, `taps`).
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from orbit_runtime.adapters.buffer import AdapterBuffer, Opening, opened, opening_of, write_place
from orbit_runtime.sglang_plugin.shards import Lent, Piece

KEPT_SECONDS = 600.0
"""How long memory is kept that nobody opens."""
_ALIGNMENT = 64
_OPENED = b"\1"
"""What the first byte becomes once rank 0 maps the memory, which it then no longer needs from the lender."""
Reports = Mapping[int, Sequence[Piece]]
"""Pieces by slot."""

_kept: list[tuple[float, AdapterBuffer]] = []
_lock = threading.Lock()


def lend(slots: Reports) -> tuple[dict[int, list[Piece]], Opening | None]:
    """The pieces without their values, and where these lie; None if there are none."""
    tensors = [each.data for pieces in slots.values() for each in pieces if isinstance(each.data, Tensor)]
    sizes = [-(-each.numel() * each.element_size() // _ALIGNMENT) * _ALIGNMENT for each in tensors]
    _give_back()
    if not sum(sizes):
        return {slot: list(pieces) for slot, pieces in slots.items()}, None
    memory = AdapterBuffer()
    position = memory.reserve("pieces", _ALIGNMENT + sum(sizes)) + _ALIGNMENT
    lent: dict[int, Lent] = {}
    for tensor, size in zip(tensors, sizes, strict=True):
        if size:
            values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            write_place(memory.descriptor, memoryview(values.numpy()), position, position + size)
        lent[id(tensor)] = Lent(position, tuple(tensor.shape), tensor.dtype)
        position += size
    with _lock:
        _kept.append((time.monotonic(), memory))
    named = {
        slot: [replace(each, data=lent.get(id(each.data), each.data)) for each in pieces]
        for slot, pieces in slots.items()
    }
    return named, opening_of(memory)


def borrow(slots: Reports, opening: Opening | None) -> dict[int, list[Piece]]:
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


def _take(mapped: mmap.mmap, data: Tensor | Lent | str) -> Tensor | Lent | str:
    if not isinstance(data, Lent):
        return data
    if not math.prod(data.shape):
        return torch.empty(data.shape, dtype=data.dtype)
    flat = torch.frombuffer(mapped, dtype=data.dtype, count=math.prod(data.shape), offset=data.start)
    return flat.view(data.shape)
