"""The leading process's description of the ranks' adapter: its tensors, their names in files, and who holds them.

Belongs here: where each rank's values lie in a file that all write together. Does not belong here: the values
themselves (`rank`), file formats (`adapters`, `training.state`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.inject import InjectedAdapter
from orbit_runtime.adapters.masters import MasterPlace, Masters
from orbit_runtime.digests import PIECE_BYTES

WINDOW_BYTES = 1 << 26
"""Bytes transferred at a time, if a rank or a reader cannot share the memory that all is written to."""

What = Literal["master", "exp_avg", "exp_avg_sq", "lora", "rotations", "applied"]
"""fp32 masters and moments; LoRA factors and OFT rotations as they are published, BF16; and what the newest `score`
multiplied by."""
Holder = Literal["policy", "critic"]
"""Owner of a file's parameters."""


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """One parameter of a layer on one rank."""

    place: MasterPlace
    owner: str
    """The layer that owns the master."""
    file_names: tuple[str, ...]
    """Names of the whole parameter in files, without PEFT's prefix."""


Outline = Mapping[str, HeldParameter]
"""`<module>.<kind>` → what a rank holds of it; every layer that shares a parameter has an entry."""


def outline_of(injected: InjectedAdapter, masters: Masters) -> dict[str, HeldParameter]:
    """What a rank holds of each parameter.

    Args: masters: those of the adapter that is outlined: the model's own, or a further one (`add_masters`).
    """
    owner, config = masters.owner, masters.config
    return {
        f"{name}.{kind}": HeldParameter(MasterPlace(kind, layer.part, shape), owner[name], layer.file_names(kind))
        for name, layer in injected.layers.items()
        for kind, shape in layer.shapes(config).items()
    }


def master_keys(outline: Outline) -> list[str]:
    """The parameters that have masters: of those that layers share, the owner's."""
    return sorted(key for key, held in outline.items() if key.rpartition(".")[0] == held.owner)


def whole_shape(what: What, held: HeldParameter, config: AdapterConfig) -> tuple[int, ...]:
    shape = held.place.shape
    turned = what in ("rotations", "applied") and config.type == "OFT"
    return (*shape[:-1], config.block_size, config.block_size) if turned else shape


def cut_published(place: MasterPlace, whole: Tensor, config: AdapterConfig) -> Tensor:
    """The part of a published parameter that a rank must apply.

    Args:
        whole: the LoRA factor, or rotations `[…, K / b, b, b]`.
    """
    if place.kind != "oft_R":
        return place.cut(whole, config)
    # A block of a rotation is laid out as a row, like a block's parameters.
    return place.cut(whole.flatten(-2), config).unflatten(-1, whole.shape[-2:])


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file, and the source of its values."""

    name: str
    what: What
    key: str
    index: int | None
    """Index along the first dimension; None for the whole tensor."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spot:
    """An entry, and the position of its first byte; outside the window if the window begins within the entry."""

    what: What
    key: str
    index: int | None
    position: int


@dataclass(frozen=True, slots=True)
class FileWindow:
    """Consecutive pieces of a file that ranks write at a time."""

    start: int
    """First byte in the file."""
    pieces: tuple[int, ...]
    """Sizes of its pieces in bytes."""
    spots: tuple[Spot, ...]
    """Positions count from the window's first byte."""
    holder: Holder = "policy"

    @property
    def size(self) -> int:
        return sum(self.pieces)


@dataclass(frozen=True)
class DividedFile:
    """Like `tensorfile.TensorFile`, for tensors that ranks hold in parts."""

    header: bytes
    entries: Sequence[TensorEntry]
    """Sorted by name."""
    dtype: torch.dtype
    holder: Holder = "policy"

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of the header and of each tensor."""
        return [len(self.header), *(math.prod(entry.shape) * self.dtype.itemsize for entry in self.entries)]

    def windows(self, limit: int = WINDOW_BYTES) -> Iterator[FileWindow]:
        """All bytes after the header, in windows of at most `limit` bytes, which is at least a piece."""
        position = len(self.header)
        start, pieces, spots = position, list[int](), list[tuple[TensorEntry, int]]()
        for entry, size in zip(self.entries, self.sizes[1:], strict=True):
            first = position
            for length in (min(PIECE_BYTES, size - done) for done in range(0, size, PIECE_BYTES)):
                if pieces and position + length - start > limit:
                    yield self._window(start, pieces, spots)
                    start, pieces, spots = position, [], []
                if not spots or spots[-1][0] is not entry:
                    spots.append((entry, first))
                pieces.append(length)
                position += length
        if pieces:
            yield self._window(start, pieces, spots)

    def _window(self, start: int, pieces: Sequence[int], spots: Sequence[tuple[TensorEntry, int]]) -> FileWindow:
        placed = (Spot(entry.what, entry.key, entry.index, first - start) for entry, first in spots)
        return FileWindow(start, tuple(pieces), tuple(placed), self.holder)


def build_divided(
    entries: Iterable[TensorEntry],
    dtype: torch.dtype,
    metadata: Mapping[str, str] = tensorfile.FORMAT,
    holder: Holder = "policy",
) -> DividedFile:
    ordered = sorted(entries, key=lambda entry: entry.name)
    header = tensorfile.build_header({entry.name: entry.shape for entry in ordered}, dtype, metadata)
    return DividedFile(header, ordered, dtype, holder)


@dataclass(frozen=True, slots=True)
class Runs:
    """Positions of a rank's values of a parameter in each of its entries: runs of `length` values."""

    rows: range | None
    """Indices of the entries, of which the rank holds the same runs each; None if the parameter is one entry."""
    starts: np.ndarray
    """int64, in values from the entry's first, in the order in which the rank holds them."""
    length: int

    @property
    def num_values(self) -> int:
        """Number of values in one entry."""
        return len(self.starts) * self.length


def held_runs(what: What, held: HeldParameter, config: AdapterConfig, *, by_row: bool) -> Runs:
    """
    Args:
        by_row: whether each row of the parameter, an expert's, is an entry of its own.
    """
    shape = whole_shape(what, held, config)
    # A block of a rotation is laid out as a row, like a block's parameters.
    whole = (*held.place.shape[:-1], math.prod(shape[len(held.place.shape) - 1 :]))
    # Tensors without memory: cutting them tells where the part lies.
    region = held.place.cut(torch.empty(whole, device="meta"), config)
    if not by_row:
        return _runs(None, region, 0)
    num_values = math.prod(whole[1:])
    first = region.storage_offset() // num_values
    return _runs(range(first, first + len(region)), region[0], first * num_values)


def _runs(rows: range | None, region: Tensor, origin: int) -> Runs:
    length, dims = 1, region.dim()
    while dims and region.stride(dims - 1) == length:
        length *= region.shape[dims - 1]
        dims -= 1
    starts = np.array([region.storage_offset() - origin], dtype=np.int64)
    for dim in range(dims):
        starts = (starts[:, None] + np.arange(region.shape[dim]) * region.stride(dim)).reshape(-1)
    return Runs(rows, starts, length)


def spans(runs: Runs, own: Tensor, position: int, end: int, size: int) -> Iterator[tuple[int, Tensor]]:
    """Views of a rank's values of an entry that lie within the first `end` bytes, each with the byte it begins at.

    Args:
        position: of the entry's first byte.
        size: bytes of a value.
    """
    # Masters and moments are contiguous, so these are views of them.
    values, length = own.contiguous().view(-1), runs.length
    for number, first in enumerate((position + runs.starts * size).tolist()):
        begin, stop = max(first, 0), min(first + length * size, end)
        if begin < stop:
            origin = number * length - first // size
            yield begin, values[origin + begin // size : origin + stop // size]


def split_entries(what: What, key: str, source: str, held: HeldParameter, shape: tuple[int, ...]) -> list[TensorEntry]:
    """The file entries of one parameter.

    Args:
        source: the parameter that has the values: the owner's, if layers share one.
    """
    if len(held.file_names) == 1:
        return [TensorEntry(held.file_names[0], what, source, None, shape)]
    return [TensorEntry(name, what, source, index, shape[1:]) for index, name in enumerate(held.file_names)]


def layer_of(key: str) -> str:
    """Example: `model.layers.3.mlp.up_proj.lora_A` → `model.layers.3`."""
    before, found, after = key.partition(".layers.")
    return f"{before}{found}{after.partition('.')[0]}"
