"""The rectangle of a layer that this process holds, if a model is divided among several processes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

WHOLE = slice(None)


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Rows (outputs), columns (inputs) and experts of a weight.

    Example: the second half of the heads is `WeightPart(slice(32, 64))` of `q_proj`, and of `o_proj`
    `WeightPart(columns=slice(32, 64))`.
    """

    rows: slice = WHOLE
    columns: slice = WHOLE
    experts: slice = WHOLE
    shape: tuple[int, int] = (0, 0)
    """Shape of the whole weight `[N, K]`."""
    num_experts: int = 0
    """Number of experts of the whole layer; 0 for a layer without experts."""
    group: str = "tensor"
    """The processes that divide the layer, or that each compute a share of a whole parameter's gradient: `tensor` or
    `expert`; `tokens` for modules that read the hidden state outside the layers, if the tokens are divided there;
    `none` if every process computes all of it.
    """

    def cut(self, kind: str, whole: Tensor, block_size: int) -> Tensor:
        """This process's part of a parameter: `lora_A` `[…, r, K]`, `lora_B` `[…, N, r]`, `oft_R` `[…, K / b, …]`.
        Other kinds are not divided.
        """
        if self.num_experts and whole.shape[0] == self.num_experts:
            whole = whole[self.experts]
        if kind == "lora_A":
            return whole[..., self.columns]
        if kind == "lora_B":
            return whole[..., self.rows, :]
        if kind != "oft_R":
            return whole
        start, stop, _ = self.columns.indices(self.shape[1])
        return whole[..., start // block_size : stop // block_size, :]

    def is_whole(self, kind: str, num_held: int | None) -> bool:
        """Whether every process of the group holds the whole parameter, and its gradient is the sum of theirs.

        Args:
            num_held: number of experts that the parameter covers: 1 if they share it; None for a layer without experts.
        """
        if self.num_experts:
            return num_held == 1
        return (self.columns if kind in ("lora_A", "oft_R") else self.rows) == WHOLE
