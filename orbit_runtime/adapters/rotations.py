"""OFT's R of every layer, built a batch at a time.

A batch is the same whoever asks, be it training, a publish or its proof: how many blocks a product has together may
change its bits on a device. Few layers are one batch, which is much faster than building them one by one; an adapter
that is large is many, because building R takes several times its memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.oft import rotations
from orbit_runtime.adapters.pages import Pages
from orbit_runtime.adapters.part import WHOLE

BATCH_VALUES = 1 << 20
"""Values of R in a batch. A single layer or expert may have more."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Some experts' parameters of one owner; `experts` is None if they share them, or there are none."""

    owner: str
    experts: range | None


Batch = tuple[Blocks, ...]


@dataclass(eq=False)
class RotationCache:
    """The newest values built, shared by layers that follow each other. Invalid once the masters change."""

    batch: tuple[Batch, dict[Blocks, Tensor]] | None = None
    applied: tuple[str, slice, Tensor] | None = None
    """Owner, experts, and R as layers multiply by it."""
    pages: Pages = field(default_factory=Pages)
    """Memory of layers that are done."""


class Rotations:
    """R of owners' current parameters."""

    def __init__(self, config: AdapterConfig, parameters: Mapping[str, Tensor], stacked: Set[str]) -> None:
        """
        Args:
            parameters: `[…, K / b, b (b - 1) / 2]` by owner.
            stacked: the owners whose experts have one each, along the first dimension.
        """
        self._config = config
        self._parameters = parameters
        self._stacked = stacked
        self._batches = list(self._cut())
        self._batches_of: dict[str, list[Batch]] = {}
        for batch in self._batches:
            for owner in dict.fromkeys(blocks.owner for blocks in batch):
                self._batches_of.setdefault(owner, []).append(batch)

    def every(self) -> dict[str, Tensor]:
        """fp32 R by owner."""
        parts: dict[str, list[Tensor]] = {}
        for batch in self._batches:
            for blocks, R in self._build(batch).items():
                parts.setdefault(blocks.owner, []).append(R)
        return {owner: torch.cat(each) if len(each) > 1 else each[0] for owner, each in parts.items()}

    def of(self, owner: str, experts: slice, newest: RotationCache) -> Tensor:
        """fp32 R of one owner, of these of the experts that have one each; the same bits as in `every`."""
        found = []
        wanted = range(len(self._parameters[owner]))[experts]
        for batch in self._batches_of[owner]:
            for blocks in (each for each in batch if each.owner == owner):
                own = blocks.experts
                if own is None:
                    return self._built(batch, newest)[blocks]
                first, last = max(own.start, wanted.start), min(own.stop, wanted.stop)
                if first < last:
                    found.append(self._built(batch, newest)[blocks][first - own.start : last - own.start])
        return torch.cat(found) if len(found) > 1 else found[0]

    def _built(self, batch: Batch, newest: RotationCache) -> dict[Blocks, Tensor]:
        if newest.batch is None or newest.batch[0] is not batch:
            # Released first.
            newest.batch = None
            newest.batch = (batch, self._build(batch))
        return newest.batch[1]

    def _build(self, batch: Batch) -> dict[Blocks, Tensor]:
        values = [self._values(blocks) for blocks in batch]
        flat = [each.flatten(0, -2) for each in values]
        config = self._config
        stacked = rotations(torch.cat(flat), config.block_size, config.parametrization, config.neumann_terms)
        parts = torch.split(stacked, [len(blocks) for blocks in flat])
        return {
            blocks: part.unflatten(0, each.shape[:-1]) for blocks, each, part in zip(batch, values, parts, strict=True)
        }

    def _values(self, blocks: Blocks) -> Tensor:
        parameter, experts = self._parameters[blocks.owner], blocks.experts
        # Sliced even where it is the whole: its gradient is then no view that keeps the batch's.
        return parameter[WHOLE if experts is None else slice(experts.start, experts.stop)]

    def _cut(self) -> Iterator[Batch]:
        batch, size = list[Blocks](), 0
        for blocks, values in self._blocks():
            if batch and size + values > BATCH_VALUES:
                yield tuple(batch)
                batch, size = [], 0
            batch.append(blocks)
            size += values
        if batch:
            yield tuple(batch)

    def _blocks(self) -> Iterator[tuple[Blocks, int]]:
        """Yields blocks with their number of values of R."""
        for owner, parameter in self._parameters.items():
            values = math.prod(parameter.shape[:-1]) * self._config.block_size**2
            if owner not in self._stacked:
                yield Blocks(owner, None), values
                continue
            each, count = values // len(parameter), len(parameter)
            step = max(1, BATCH_VALUES // each)
            for start in range(0, count, step):
                experts = range(start, min(start + step, count))
                yield Blocks(owner, experts), len(experts) * each
