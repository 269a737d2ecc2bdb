"""Applies to each slot the adapter of its expert, in one product over all experts: no loop, nothing read by the host.

Belongs here: those products and their gradients. Does not belong here: the order of slots (the base's), the sums
(`expert_layer`), the maths of one matrix (`lora`, `oft`).

Legend: `S` slots sorted by expert, `E` experts, `G` groups of one grouped product, weights `[G, K, N]`, `b` the size of
OFT's blocks, `n = K / b` their number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

ALIGNMENT = 16
"""Bytes; a grouped product requires operand rows to be a multiple of this."""


class _Grouped(torch.autograd.Function):
    """`F.grouped_mm` with a backward that accepts gradients that are not contiguous."""

    @staticmethod
    def forward(ctx: Any, x_SK: Tensor, w_GKN: Tensor, offsets_G: Tensor) -> Tensor:
        ctx.save_for_backward(x_SK, w_GKN, offsets_G)
        return F.grouped_mm(x_SK, w_GKN, offs=offsets_G)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_SN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_SK, w_GKN, offsets_G = ctx.saved_tensors
        dy_SN = dy_SN.contiguous()
        dx = F.grouped_mm(dy_SN, w_GKN.transpose(1, 2), offs=offsets_G) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            # The gradient has the memory layout of the weights.
            turned = w_GKN.stride(1) == 1
            dw = F.grouped_mm(dy_SN.t(), x_SK, offs=offsets_G).transpose(1, 2) if turned else None
            dw = F.grouped_mm(x_SK.t(), dy_SN, offs=offsets_G) if dw is None else dw
        return dx, dw, None


def multiply_by_expert(x_SK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """`[S, N]`: `x[s] @ w[expert of s]`, in x's dtype.

    Args:
        offsets_E: int32; end of each expert's slots. Every slot belongs to an expert.
    """
    inner, outer = w_EKN.shape[1:]
    if inner * x_SK.itemsize % ALIGNMENT or outer * x_SK.itemsize % ALIGNMENT:
        # Ranks below 16 bytes: padded with columns of zeros, which do not affect the product.
        per_row = ALIGNMENT // x_SK.itemsize
        more_in, more_out = -inner % per_row, -outer % per_row
        padded = multiply_by_expert(F.pad(x_SK, (0, more_in)), F.pad(w_EKN, (0, more_out, 0, more_in)), offsets_E)
        return padded[:, :outer]
    result: Tensor = _Grouped.apply(x_SK.contiguous(), w_EKN, offsets_E)
    return result


def rotate_by_expert(x_SK: Tensor, R_Enbb: Tensor, offsets_E: Tensor) -> Tensor:
    """`[S, K]`: `x[s] @ blockdiag(R[expert of s])`; every block of every expert is a group of one product."""
    experts, blocks, size, _ = R_Enbb.shape
    slots = len(x_SK)
    first_n = torch.arange(blocks, device=x_SK.device, dtype=offsets_E.dtype)[:, None] * slots
    offsets_G = (first_n + offsets_E).view(-1)
    x_nSb = x_SK.view(slots, blocks, size).transpose(0, 1).reshape(blocks * slots, size)
    w_Gbb = R_Enbb.to(x_SK.dtype).transpose(0, 1).reshape(blocks * experts, size, size)
    turned = multiply_by_expert(x_nSb, w_Gbb, offsets_G)
    return turned.view(blocks, slots, size).transpose(0, 1).reshape(slots, blocks * size)
