"""The rectangle of a layer that this process holds, where a model is divided among several.

Belongs here: what of a layer's adapter follows from it. Does not belong here: who holds which part (`policy.shares`),
cutting packed weights (`quant.slicing`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

WHOLE = slice(None)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows (outputs) and columns (inputs) of a weight, of experts which.

    Example: the second half of `q_proj`'s heads: `Part(slice(32, 64))`; of `o_proj`: `Part(columns=slice(32, 64))`.
    """

    rows: slice = WHOLE
    columns: slice = WHOLE
    experts: slice = WHOLE
    shape: tuple[int, int] = (0, 0)
    """Of the whole weight `[N, K]`."""
    num_experts: int = 0
    """Of the whole layer; 0: it has none."""
    group: str = "tensor"
    """Of processes over which the layer is divided, or that each compute a share of what a whole parameter's gradient
    is: `tensor` or `expert`; `none`: every process computes all of it."""

    def cut(self, kind: str, whole: Tensor, block_size: int) -> Tensor:
        """This process's part of a parameter: `lora_A` `[…, r, K]`, `lora_B` `[…, N, r]`, `oft_R` `[…, K / b, …]`."""
        if self.num_experts and whole.shape[0] == self.num_experts:
            whole = whole[self.experts]
        if kind == "lora_A":
            return whole[..., self.columns]
        if kind == "lora_B":
            return whole[..., self.rows, :]
        start, stop, _ = self.columns.indices(self.shape[1])
        return whole[..., start // block_size : stop // block_size, :]

    def is_whole(self, kind: str, num_held: int | None) -> bool:
        """Whether every process of the group holds the parameter, and its gradient is the sum of theirs.

        Args:
            num_held: how many experts the parameter is for: 1 where they share it; None: it is of no experts.
        """
        if self.num_experts:
            return num_held == 1
        return (self.columns if kind in ("lora_A", "oft_R") else self.rows) == WHOLE
