"""Temporary memory on the host that goes back to the system with its last view, or to whoever needs the next.

malloc would keep it: glibc maps a large block separately only until the first one of that size is freed. It then raises
its threshold and takes the next from the heap, and pieces that are freed in another order than they were allocated
leave holes. A publish of 200 MB in pieces of 16 MiB kept 96 to 160 MiB that way, and keeps none now.
"""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

SMALLEST_BYTES = 1 << 20
"""Less than this is malloc's."""
KEPT_BYTES = 1 << 23
"""Blocks up to this size are kept by `Pages`."""
_KEPT_BLOCKS = 2
_FREE = 3
"""References to a block that no tensor uses: the list's, the loop's, and the count's own."""


def room(size: int, dtype: torch.dtype) -> Tensor:
    """`[size]`, not initialised, on the host."""
    if size * dtype.itemsize < SMALLEST_BYTES:
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer(_block(size * dtype.itemsize), dtype=dtype, count=size)


def _block(num_bytes: int) -> mmap.mmap:
    # Private pages: shared ones, Python's default, are a file in memory for the kernel and take it longer.
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Pages:
    """Memory that one layer after the other needs: the system clears every page that it gives, which takes longer than
    to write it. For one thread; what is kept lives as long as this object."""

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []

    def room(self, size: int, dtype: torch.dtype) -> Tensor:
        """See the function `room`; the pages may come from tensors that are gone."""
        num_bytes = size * dtype.itemsize
        if not SMALLEST_BYTES <= num_bytes <= KEPT_BYTES:
            return room(size, dtype)
        for block in self._blocks:
            if len(block) >= num_bytes and sys.getrefcount(block) == _FREE:
                return torch.frombuffer(block, dtype=dtype, count=size)
        made = _block(KEPT_BYTES)
        if len(self._blocks) < _KEPT_BLOCKS:
            self._blocks.append(made)
        return torch.frombuffer(made, dtype=dtype, count=size)
