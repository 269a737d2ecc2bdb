"""Applies an adapter to the base's weights, a run of rows at a time.

    LoRA   y = x W^T + s (x A^T) B^T      =>   W' = W + s B A
    OFT    y = (x R) W^T                  =>   W' = W R^T, block by block

Belongs here: applying a combination to runs of rows, and checking that it fits the base.
Does not belong here: reading or writing the base (`rewrite`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from orbit_runtime.adapters.oft import rotate
from orbit_runtime.checkpoints.combine import Combined
from orbit_runtime.errors import ModelError


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """A `Change` for `rewrite`."""

    combined: Combined

    def modules(self) -> frozenset[str]:
        return self.combined.modules()

    def apply(self, module: str, rows: Tensor, start: int) -> Tensor:
        """fp32 rows of W → fp32 rows of W'."""
        if module in self.combined.rotation:
            # A row w of W becomes w R^T: the same product as for an input, with R transposed.
            return rotate(rows, self.combined.rotation[module].mT.contiguous())
        for part in self.combined.lora[module]:
            rows = rows + part.delta(start, start + len(rows))
        return rows


def check_fits(combined: Combined, shapes: Mapping[str, tuple[int, int]], base: str) -> None:
    """Raises `ModelError` naming the first adapted module that the base lacks or has in another shape."""
    for module in sorted(combined.modules()):
        if module not in shapes:
            raise ModelError(
                f"the adapter changes {module}, which is not a linear layer of the base",
                where=base,
                fix="name the base that the adapter was trained on",
            )
        rows, columns = shapes[module]
        if module in combined.rotation:
            blocks, size, _ = combined.rotation[module].shape
            wanted = f"rotates {blocks * size} inputs" if blocks * size != columns else ""
        else:
            wanted = next(
                (
                    f"is [{part.lora_B.shape[0]}, {part.lora_A.shape[1]}]"
                    for part in combined.lora[module]
                    if (part.lora_B.shape[0], part.lora_A.shape[1]) != (rows, columns)
                ),
                "",
            )
            rank = max(part.lora_A.shape[0] for part in combined.lora[module])
            if not wanted and rank > min(rows, columns):
                wanted = f"has rank {rank}"
        if wanted:
            raise ModelError(
                f"the adapter of {module} {wanted}, the base's weight is [{rows}, {columns}]",
                where=base,
                fix="name the base that the adapter was trained on",
            )
