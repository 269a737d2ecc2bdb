"""The values of a set of parameters that a rank holds, at their places in the files that all ranks write and read.

Belongs here: copying a rank's values to and from their places in a window of a file. Does not belong here: where values
lie (`outline`), files (`trainer`), passes and updates (`rank`).
"""

from __future__ import annotations

import os
from collections.abc import Buffer, Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orbit_runtime.adapters.buffer import MappedPlace, MemoryOpening, opened, read_place
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.training.megatron.outline import (
    FileWindow,
    HeldParameter,
    Outline,
    Runs,
    Spot,
    What,
    held_runs,
    spans,
)
from orbit_runtime.training.state import MOMENTS

BUILT: tuple[What, ...] = ("rotations", "applied")
"""Kinds that are built, because they are not held as the files have them."""


@dataclass(slots=True)
class WindowResult:
    """Result of a rank that wrote into a window."""

    bytes: int = 0
    sent: list[tuple[int, np.ndarray[Any, Any]]] = field(default_factory=list)
    """Positions in the window and bytes of what it could not write itself: it is on another machine."""
    is_exact: bool = True
    """False if something that was applied has another size, is not representable in the file's dtype, or cannot be
    built again."""


class RankParameters:
    """A rank's parts of the parameters of one adapter, and of their moments."""

    def __init__(
        self,
        outline: Outline,
        config: AdapterConfig,
        parameters: Mapping[str, nn.Parameter],
        owned: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """
        Args:
            outline: this rank's.
            owned: the parameters that this rank updates. It writes their values, and has their moments.
        """
        self.outline = outline
        self._config = config
        self._parameters = parameters
        self._owned = owned
        self._optimizer = optimizer
        self.built: Callable[[What, str, int | None], Tensor | None] = lambda *_: None
        """Builds rotations as they are published, and what the newest `score` multiplied by: of a parameter, or of one
        of the experts that this rank holds. None if it had other values."""
        self._runs: dict[tuple[str, bool, bool], Runs] = {}

    def fill(self, window: FileWindow, dtype: torch.dtype, opening: MemoryOpening, start: int) -> WindowResult:
        """Writes this rank's parts of a file into memory that all ranks of a machine share.

        A part that several ranks hold is written by one of them.

        Args:
            dtype: of the file.
            opening: the memory.
            start: position in it of the window's first byte.

        Raises:
            OutOfMemoryError: the machine has no memory left for it.
        """
        filled, place = WindowResult(), None
        with ExitStack() as stack:
            # On another machine than the run's process there is no such memory.
            with suppress(OSError):
                place = MappedPlace(stack.enter_context(opened(opening, os.O_RDWR)), start, window.size)
            for spot, position, own in self._spans(window, dtype.itemsize, filled, only_owned=True):
                if spot.what == "applied" and not torch.equal(own.to(dtype).to(own.dtype), own):
                    filled.is_exact = False
                size = own.numel() * dtype.itemsize
                filled.bytes += size
                if place is None:
                    filled.sent.append((position, own.to(dtype).cpu().contiguous().view(torch.uint8).numpy()))
                else:
                    # Rounded where it is to lie.
                    torch.frombuffer(place.view(position, position + size), dtype=dtype).copy_(own)
        return filled

    def take(self, window: FileWindow, opening: MemoryOpening, start: int, data: bytes | None) -> bool:
        """Copies this rank's parts of a state's file into masters and moments.

        Args:
            opening: the memory that all ranks of a machine share.
            start: position in it of the window's first byte.
            data: the window's bytes, for ranks on other machines.

        Returns:
            Whether the bytes could be read.
        """
        with torch.no_grad(), ExitStack() as stack:
            source: Buffer | None = data
            if source is None:
                try:
                    descriptor = stack.enter_context(opened(opening, os.O_RDONLY))
                except OSError:
                    return False
                source = read_place(descriptor, start, window.size)
            values = source if isinstance(source, memoryview) else bytearray(source)
            given = torch.frombuffer(values, dtype=torch.float32)
            for spot in window.spots:
                if spot.what in MOMENTS and self.owns(spot.key):
                    master = self._parameters[spot.key]
                    moments = self._optimizer.state[master]
                    if spot.what not in moments:
                        moments[spot.what] = torch.empty_like(master)
            for _, position, own in self._spans(window, given.element_size(), WindowResult(), only_owned=False):
                first = position // given.element_size()
                own.copy_(given[first : first + own.numel()])
        return True

    def restored(self, updates: int) -> None:
        """Call once all windows of a state were taken, which was saved after this number of updates."""
        if not updates:
            self._optimizer.state.clear()
        for master, moments in self._optimizer.state.items():
            moments["step"] = torch.tensor(float(updates), dtype=torch.float32, device=master.device)

    def value(self, what: What, key: str, row: int | None) -> Tensor | None:
        """Args: row: which of the experts that this rank holds; None for all."""
        if what in BUILT:
            return self.built(what, key, row)
        master = self._parameters[key]
        found = master if what in ("master", "lora") else self._optimizer.state[master][what]
        return found if row is None else found[row]

    def owns(self, key: str) -> bool:
        """Whether this rank updates the master of this parameter."""
        held = self.outline.get(key)
        return held is not None and f"{held.owner}.{held.place.kind}" in self._owned

    def _spans(
        self, window: FileWindow, size: int, filled: WindowResult, *, only_owned: bool
    ) -> Iterator[tuple[Spot, int, Tensor]]:
        """Views of this rank's values that lie in the window, each with its entry and its first byte there.

        Args:
            size: bytes of a value in the file.
            only_owned: leave out values that another rank writes.
        """
        end = window.size
        for spot in window.spots:
            held = self.outline.get(spot.key)
            if held is None or ((only_owned or spot.what in MOMENTS) and not self.owns(spot.key)):
                continue
            runs, row = self._find_runs(spot, held), None
            if runs.rows is not None:
                if spot.index is None or spot.index not in runs.rows:
                    continue
                row = runs.rows.index(spot.index)
            own = self.value(spot.what, spot.key, row)
            if own is not None and own.numel() == runs.num_values:
                for position, span in spans(runs, own.detach(), spot.position, end, size):
                    yield spot, position, span
            else:
                filled.is_exact = False

    def _find_runs(self, spot: Spot, held: HeldParameter) -> Runs:
        # Rotations have another shape than their parameters.
        kind = (spot.key, spot.what in BUILT, spot.index is not None)
        if kind not in self._runs:
            self._runs[kind] = held_runs(spot.what, held, self._config, by_row=spot.index is not None)
        return self._runs[kind]
