"""Steps of `direct.DirectDecoder` with gradients written by hand: few passes over memory, and little that is saved.

Belongs here: each step's gradient; its forward is the function that passes without gradient call, so that both give the
same bits. Does not belong here: gradients of attention (`attention`) and of log-probs (`logprobs`).

Legend: `T` tokens, `N` hidden size or outputs, `K` inputs, `R` LoRA ranks of a group's members together, `H` heads,
`D` head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from orbit_runtime.adapters.oft import rotate


class Normed(torch.autograd.Function):
    """`x * scale(x) * weight`, fp32 in and out, where the scale is 1 / sqrt(mean(x²) + eps) over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale_of: Callable[[Tensor], Tensor]) -> Tensor:
        scale = scale_of(x)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad = grad * weight
        slope = torch.linalg.vecdot(grad, x).unsqueeze(-1).mul_(scale.pow(3).mul_(1.0 / x.shape[-1]))
        return grad.mul_(scale).addcmul_(x, slope, value=-1.0), None, None


def turned(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotary embedding, computed in the tables' fp32: (first half, second half) → (-second, first) by sine, whose sign
    is part of the table."""
    if torch.is_grad_enabled() and x_THD.requires_grad:
        return _Turned.apply(x_THD, cos_T1D, sin_T1D, dtype)
    half = x_THD.shape[-1] // 2
    swapped_THD = torch.cat((x_THD[..., half:], x_THD[..., :half]), -1).mul(sin_T1D)
    return swapped_THD.addcmul_(x_THD, cos_T1D).to(dtype)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(cos_T1D, sin_T1D)
        ctx.dtype = x_THD.dtype
        return turned(x_THD, cos_T1D, sin_T1D, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        cos_T1D, sin_T1D = ctx.saved_tensors
        return turned(grad_THD, cos_T1D, -sin_T1D, ctx.dtype), None, None, None


def gated(both_TN: Tensor) -> Tensor:
    """`silu(gate) * up` of gate and up side by side."""
    if torch.is_grad_enabled() and both_TN.requires_grad:
        return _Gated.apply(both_TN)
    gate_TN, up_TN = both_TN.chunk(2, -1)
    return F.silu(gate_TN).mul_(up_TN)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both_TN: Tensor) -> Tensor:
        ctx.save_for_backward(both_TN)
        return gated(both_TN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> Tensor:
        (both_TN,) = ctx.saved_tensors
        gate_TN, up_TN = both_TN.chunk(2, -1)
        found = torch.empty_like(both_TN)
        of_gate_TN, of_up_TN = found.chunk(2, -1)
        silu_TN = F.silu(gate_TN)
        torch.mul(grad_TN, silu_TN, out=of_up_TN)
        torch.ops.aten.silu_backward.grad_input(torch.mul(grad_TN, up_TN, out=silu_TN), gate_TN, grad_input=of_gate_TN)
        return found


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
        A_RK: Tensor | None,
        B_NR: Tensor | None,
        scaling: float,
        adapted: Callable[[Tensor], Tensor],
        input_gradient: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(None if A_RK is None else x_TK, A_RK, B_NR)
        ctx.scaling, ctx.input_gradient = scaling, input_gradient
        return adapted(x_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, A_RK, B_NR = ctx.saved_tensors
        of_x = ctx.input_gradient(grad_TN) if ctx.needs_input_grad[0] else None
        if A_RK is None:
            return of_x, None, None, None, None, None
        grad_TR = torch.mm(grad_TN, B_NR).mul_(ctx.scaling)
        if of_x is not None:
            of_x.addmm_(grad_TR, A_RK)
        of_B = torch.mm(grad_TN.t(), torch.mm(x_TK, A_RK.t())).mul_(ctx.scaling)
        return of_x, torch.mm(grad_TR.t(), x_TK), of_B, None, None, None
