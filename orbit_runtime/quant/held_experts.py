"""Dispatch to the experts that this process holds; the contributions of other experts come from other processes.

Belongs here: slots of held experts. Does not belong here: all experts in one process (`expert_linear`), communication
between processes.

Legend: `T` tokens, `C` experts a token goes to, `S` slots of held experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orbit_runtime.quant.expert_linear import Dispatch, build_dispatch


class HeldDispatch(Dispatch):
    """A slot of an expert in another process points one row past the last; it reads 0 there."""

    def gather(self, x_TK: Tensor, *, keep: bool = True) -> Tensor:
        if keep and self._gathered is not None and self._gathered[0] is x_TK:
            return self._gathered[1]
        rows_SK = _GatherHeld.apply(x_TK, self.token_S, self.slot_of_TC)
        if keep:
            self._gathered = (x_TK, rows_SK)
        return rows_SK  # type: ignore[no-any-return]

    def combine(self, y_SN: Tensor, weight_TC: Tensor) -> Tensor:
        return super().combine(_with_zero_row(y_SN), weight_TC)


class _GatherHeld(torch.autograd.Function):
    """`expert_linear._Gather` for a subset of the slots."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x_TK: Tensor, token_S: Tensor, slot_of_TC: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_TC)
        return x_TK.index_select(0, token_S)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_SK: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (slot_of_TC,) = ctx.saved_tensors  # type: ignore[attr-defined]
        rows = _with_zero_row(grad_SK).index_select(0, slot_of_TC.view(-1))
        return rows.unflatten(0, slot_of_TC.shape).sum(1), None, None


def _with_zero_row(rows: Tensor) -> Tensor:
    return torch.cat((rows, rows.new_zeros(1, rows.shape[1])))


def build_held_dispatch(expert_TC: Tensor, held: range) -> HeldDispatch:
    """Args: expert_TC: indices among all experts of the layer, of which this process has `held`."""
    is_held = (expert_TC >= held.start) & (expert_TC < held.stop)
    whole = build_dispatch(torch.where(is_held, expert_TC - held.start, len(held)), len(held) + 1)
    # The number of slots determines the following sizes: the only value that the host reads here.
    slots = int(whole.offsets_E[-2])
    return HeldDispatch(
        whole.token_S[:slots],
        whole.expert_S[:slots],
        whole.slot_of_TC.clamp(max=slots),
        whole.order_S[:slots],
        whole.offsets_E[:-1],
    )
