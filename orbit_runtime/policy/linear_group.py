"""Linears that read the same input, multiplied as one if their weights allow it, each under its own adapter.

Belongs here: sharing one packed weight among neighbours, and the adapters over it, without gradient.
Does not belong here: one layer's dispatch and maths (`adapters`), which layers read the same input (`direct`).

Shapes: x `[T, K]`, result `[T, N]` with N the sum of the members' outputs, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from orbit_runtime.adapters.layer import AdaptedLinear, Segment
from orbit_runtime.adapters.lora import add_lora_
from orbit_runtime.adapters.oft import OFTSlot, rotate
from orbit_runtime.errors import InternalError
from orbit_runtime.quant.linear import FrozenLinear, share_rows


class LinearGroup:
    """Adapted or bare frozen linears over one input."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        self._members = list(members)
        bases = [member.base if isinstance(member, AdaptedLinear) else member for member in members]
        self._base = share_rows([base for base in bases if isinstance(base, FrozenLinear)])
        self._adapted: list[tuple[AdaptedLinear, int, int]] = []
        start = 0
        for member in members:
            stop = start + int(member.out_features)  # type: ignore[arg-type]
            if isinstance(member, AdaptedLinear):
                self._adapted.append((member, start, stop))
            start = stop
        first = self._adapted[0][0] if self._adapted else None
        self._selection = first.selection if first is not None else None
        self._rotates = first is not None and first.config.type == "OFT"

    @property
    def dense_size(self) -> int:
        """Elements of the weight that is dequantised at a time."""
        return self._base.out_features * self._base.in_features if self._base is not None else 0

    def __call__(self, x_TK: Tensor, dense: Tensor) -> Tensor:
        """`dense`: see `FrozenLinear.product`."""
        active = self._selection.active if self._selection is not None else None
        if active is None and self._base is not None:
            return self._base.product(x_TK, dense)
        if self._base is None or (self._rotates and not isinstance(active, str)):
            return self._one_by_one(x_TK)
        runs: tuple[Segment, ...] = ((active, 0, len(x_TK)),) if isinstance(active, str) else active or ()
        if self._rotates:
            slots: list[OFTSlot] = [layer.slot(str(active)) for layer, _, _ in self._adapted]  # type: ignore[misc]
            one_input = len(slots) == len(self._members) and all(s.rotation is slots[0].rotation for s in slots)
            return self._base.product(rotate(x_TK, slots[0].rotation), dense) if one_input else self._one_by_one(x_TK)
        if runs and runs[-1][2] > len(x_TK):
            raise InternalError(f"adapter segments reach row {runs[-1][2]} of {len(x_TK)}")
        y_TN: Tensor = self._base.product(x_TK, dense)
        for layer, first, last in self._adapted:
            for name, start, stop in runs:
                if name is not None and stop > start:
                    add_lora_(y_TN[start:stop, first:last], x_TK[start:stop], layer.slot(name))  # type: ignore[arg-type]
        return y_TN

    def _one_by_one(self, x_TK: Tensor) -> Tensor:
        parts = [member(x_TK) for member in self._members]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
