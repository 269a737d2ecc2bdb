"""Frozen modules that are not linears: the embedding, and norms in one kernel."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.nn import functional as F


class FrozenEmbedding(nn.Module):
    """A look-up in the checkpoint's BF16 table `[V, N]`; rows are widened to the compute dtype afterwards."""

    def __init__(self, weight: torch.Tensor, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.compute_dtype = compute_dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight).to(self.compute_dtype)


class FusedRMSNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps) * weight` in one kernel instead of six."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def run_in_fp32(router: nn.Module) -> None:
    """Widens a router's first argument to fp32; its parameters are fp32 already, and so are its results."""
    router.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))


def fuse_norms(model: nn.Module) -> int:
    """Replaces RMS norms of the Llama form by the fused kernel; returns how many.

    Only modules with the same fp32 result on a probe are replaced, so a norm with another formula under a similar name
    (Gemma adds 1 to the weight) is left unchanged.
    """
    replaced = 0
    for name, module in list(model.named_modules()):
        eps = getattr(module, "variance_epsilon", None)
        weight = getattr(module, "weight", None)
        if "RMSNorm" not in type(module).__name__ or eps is None or weight is None or list(module.children()):
            continue
        if len(inspect.signature(module.forward).parameters) > 1:  # a gated norm
            continue
        probe = torch.linspace(-3.0, 3.0, 2 * weight.shape[-1], device=weight.device).view(2, -1)
        fused = FusedRMSNorm(weight.data, float(eps))
        if torch.allclose(fused(probe), module(probe), rtol=1e-6, atol=1e-6):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, fused)
            replaced += 1
    return replaced
