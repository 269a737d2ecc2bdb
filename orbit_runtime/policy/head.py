"""The product that gives logits: rounded to fp32, never to BF16.

Belongs here: that one product and its gradient. Does not belong here: log-probs (`logprobs`), other linear layers.

A logit of 20 is a multiple of 1/8 in BF16, so that policy and sampler, whose hidden states differ by a last bit, get
log-probs that differ by far more (MiniMax-M1, arXiv:2506.13585). SGLang does the same with
`--enable-fp32-lm-head`, which servers of a BF16 run are started with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from orbit_runtime.quant.bf16 import BF16Weight
from orbit_runtime.quant.linear import FrozenLinear


def logits_of(head: nn.Module, hidden_RN: Tensor) -> Tensor:
    """Logits `[R, V]` of BF16 or fp32 hidden states: fp32, except that a packed head keeps the dtype of BF16 ones."""
    weight_VN = _plain_weight(head)
    if hidden_RN.dtype != torch.bfloat16 or weight_VN is None:
        logits_RV: Tensor = head(hidden_RN)
        return logits_RV
    return _Logits.apply(hidden_RN, weight_VN)


def _plain_weight(head: nn.Module) -> Tensor | None:
    """Its BF16 matrix, if it is nothing else."""
    if getattr(head, "bias", None) is not None:
        return None
    if type(head) is FrozenLinear and head.rounding is None and isinstance(packed := head.packed, BF16Weight):
        return packed.qdata
    return head.weight if type(head) is nn.Linear and head.weight.dtype == torch.bfloat16 else None


class _Logits(torch.autograd.Function):
    """BF16 times BF16, kept as summed in fp32. Gradients are rounded to BF16 before they are multiplied."""

    @staticmethod
    def forward(ctx: Any, hidden_RN: Tensor, weight_VN: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_RN, weight_VN)
        if hidden_RN.is_cuda:
            return torch.mm(hidden_RN, weight_VN.T, out_dtype=torch.float32)
        # No such product exists on a CPU, which computes in fp32 in any case unless a test asks for BF16.
        return hidden_RN.float() @ weight_VN.float().T

    @staticmethod
    def backward(ctx: Any, grad_RV: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_RN, weight_VN = ctx.saved_tensors
        rounded = grad_RV.to(weight_VN.dtype)
        of_hidden = rounded @ weight_VN if ctx.needs_input_grad[0] else None
        of_weight = rounded.T @ hidden_RN if ctx.needs_input_grad[1] else None
        return of_hidden, of_weight
