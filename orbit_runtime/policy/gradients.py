"""Steps of `direct.DirectDecoder` with gradients written by hand: few passes over memory, and little that is saved.

Belongs here: each step and its gradient, by kernels where there are such (`native`), else by torch's operations; with
and without gradient it has the same bits. Does not belong here: gradients of attention (`chunked`) and of log-probs
(`logprobs`).

Legend: `T` tokens, `N` hidden size or outputs, `K` inputs, `R` LoRA ranks of a group's members together, `H` heads,
`D` head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from orbit_runtime.adapters.lora import LoRASlot
from orbit_runtime.adapters.oft import rotate
from orbit_runtime.policy import native
from orbit_runtime.quant.kernels import panels


def normed(
    x_TN: Tensor, y_TN: Tensor | None, weight_N: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x + y in fp32, and that divided by the root of its mean square, times the weight. x may be overwritten where no
    gradient is recorded.

    Args:
        y_TN: None for nothing.
        dtype: of the second result.
    """
    if not native.can_step(x_TN, dtype):
        sums_TN = x_TN if y_TN is None else x_TN + y_TN
        return sums_TN, F.rms_norm(sums_TN, weight_N.shape, weight_N, eps).to(dtype)
    if torch.is_grad_enabled():
        return _Normed.apply(x_TN, y_TN, weight_N, eps, dtype)
    return native.normed(x_TN, y_TN, weight_N, eps, dtype, in_place=True)[:2]


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TN: Tensor, y_TN: Tensor | None, weight_N: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        sums_TN, out_TN, scale_T = native.normed(x_TN, y_TN, weight_N, eps, dtype, in_place=False)
        ctx.save_for_backward(sums_TN, weight_N, scale_T)
        ctx.adds = y_TN is not None
        ctx.set_materialize_grads(False)
        return sums_TN, out_TN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_sums: Tensor | None, of_out: Tensor | None) -> tuple[Tensor | None, ...]:
        if of_out is None:
            return of_sums, of_sums if ctx.adds else None, None, None, None
        return *native.normed_gradients(*ctx.saved_tensors, of_sums, of_out, adds=ctx.adds), None, None, None


def turned(
    x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, weight_HD: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Rotary embedding, in fp32: (first half, second half) → (-second, first) by sine, whose sign is part of the table.

    Args: weight_HD: of a norm of each head before it.
    """
    if not native.can_step(x_THD, x_THD.dtype):
        half, wide_THD = x_THD.shape[-1] // 2, x_THD.float()
        if weight_HD is not None:
            wide_THD = F.rms_norm(wide_THD, wide_THD.shape[-1:], eps=eps) * weight_HD
        swapped_THD = torch.cat((wide_THD[..., half:], wide_THD[..., :half]), -1)
        return (swapped_THD * sin_T1D).addcmul_(wide_THD, cos_T1D).to(x_THD.dtype)
    if torch.is_grad_enabled() and x_THD.requires_grad:
        return _Turned.apply(x_THD, cos_T1D, sin_T1D, weight_HD, eps)
    return native.turned(x_THD, cos_T1D, sin_T1D, weight_HD, eps)[0]


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, weight_HD: Tensor | None, eps: float
    ) -> Tensor:
        turned_THD, scale_TH = native.turned(x_THD, cos_T1D, sin_T1D, weight_HD, eps)
        # Without a norm the gradient does not depend on x.
        ctx.save_for_backward(None if weight_HD is None else x_THD, cos_T1D, sin_T1D, weight_HD, scale_TH)
        return turned_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        x_THD, *rest = ctx.saved_tensors
        return native.turned_gradient(grad_THD if x_THD is None else x_THD, grad_THD, *rest), None, None, None, None


def gated(both_TN: Tensor) -> Tensor:
    """`silu(gate) * up` of gate and up side by side."""
    if not native.can_step(both_TN, both_TN.dtype):
        gate_TN, up_TN = both_TN.chunk(2, -1)
        return F.silu(gate_TN) * up_TN
    if torch.is_grad_enabled() and both_TN.requires_grad:
        return _Gated.apply(both_TN)
    return native.gated(both_TN)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both_TN: Tensor) -> Tensor:
        ctx.save_for_backward(both_TN)
        return native.gated(both_TN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> Tensor:
        return native.gated(*ctx.saved_tensors, grad_TN)


class Rotated(torch.autograd.Function):
    """`oft.rotate` of rows in numbers that give the same bits. Args: in_blocks: `LinearGroup.in_blocks`."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, rotation: Tensor, in_blocks: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(x_TK, rotation)
        return in_blocks(x_TK, lambda rows: rotate(rows, rotation))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, rotation = ctx.saved_tensors
        x, grad = (each.unflatten(1, (len(rotation), -1)).transpose(0, 1) for each in (x_TK, grad_TK))
        of_x = rotate(grad_TK, rotation.transpose(1, 2)) if ctx.needs_input_grad[0] else None
        return of_x, torch.bmm(x.transpose(1, 2), grad).to(rotation.dtype), None


class AdaptedProduct(torch.autograd.Function):
    """A frozen product with LoRA added, of several linears over one input: A `[R, K]` and B `[N, R]` hold those of all
    members, A below A, each B in its own rows and columns; None without LoRA. The input may be without gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        adapted: Callable[[Tensor], Tensor],
        input_gradient: Callable[..., Tensor],
        whole: LoRASlot | None,
        places: Sequence[tuple[slice, slice]],
        *_members: Tensor,
    ) -> Tensor:
        """Args:
        places: of each member, its ranks and its outputs.
        _members: A and B of each in turn, which get the gradients.
        """
        if whole is not None:
            ctx.save_for_backward(x_TK, whole.lora_A, whole.lora_B)
            ctx.scaling = whole.scaling
        ctx.places, ctx.input_gradient = places, input_gradient
        return adapted(x_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.places:
            return ctx.input_gradient(grad_TN), None, None, None, None
        x_TK, A_RK, B_NR = ctx.saved_tensors
        parts = [(grad_TN[:, outputs], B_NR[outputs, ranks], ranks) for ranks, outputs in ctx.places]
        grad_TR = torch.cat([panels.few(grad, B.t(), ctx.scaling) for grad, B, _ in parts], 1)
        x_TR = panels.few(x_TK, A_RK, ctx.scaling)
        of_A = panels.summed(grad_TR, x_TK)
        of_B = (panels.summed(x_TR[:, ranks], grad).t() for grad, _, ranks in parts)
        members = [each for (_, _, ranks), B in zip(parts, of_B, strict=True) for each in (of_A[ranks], B)]
        of_x = ctx.input_gradient(grad_TN, (grad_TR, A_RK)) if ctx.needs_input_grad[0] else None
        return of_x, None, None, None, None, *members
