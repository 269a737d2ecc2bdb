"""LoRA (Hu et al., arXiv 2106.09685, eq. 3): `y = base(x) + (alpha/r) B A x`.

Shapes: A `[r, K]`, B `[N, r]`, x `[..., K]`, y `[..., N]`; for experts A `[G, r, K]`, B `[G, N, r]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orbit_runtime.quant.kernels import panels
from orbit_runtime.seeds import stream_key


@dataclass(slots=True, eq=False)
class LoRASlot:
    """The values that one layer multiplies by: published BF16 values, widened to the compute dtype."""

    lora_A: Tensor
    lora_B: Tensor
    scaling: float
    named: dict[str, Tensor] | None = field(default=None, repr=False)
    """The tensors by file name, once they have been requested from the layer."""

    def tensors(self) -> dict[str, Tensor]:
        return {"lora_A": self.lora_A, "lora_B": self.lora_B}


def initial_A(shape: tuple[int, ...], seed: int, module_name: str) -> Tensor:
    """PEFT's default: Kaiming-uniform with a = sqrt(5), hence uniform in ±1/sqrt(K); from the module's own stream."""
    generator = torch.Generator().manual_seed(stream_key(seed, "adapter-init", module_name))
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[-1])


def dropout(x: Tensor, share: float, key: int) -> Tensor:
    """x with each value dropped at random and the others scaled up; the same key drops the same values."""
    generator = torch.Generator(device=x.device).manual_seed(key)
    kept = torch.empty_like(x).bernoulli_(1.0 - share, generator=generator)
    return x * kept.div_(1.0 - share)


def add_lora(y: Tensor, x: Tensor, slot: LoRASlot) -> Tensor:
    """`y + scaling * (x A^T) B^T`, scaling applied inside the product, in the same order for trainer and engine.

    May overwrite y if no gradient is recorded; use the result.
    """
    shape = y.shape
    y, x = y.reshape(-1, shape[-1]), x.reshape(-1, x.shape[-1])
    if not torch.is_grad_enabled():
        return add_lora_(y, x, slot).view(shape)
    if panels.can_multiply(x, x.shape[1]):
        h = panels.product(x, slot.lora_A.to(x.dtype)) * slot.scaling
        return panels.product(h, slot.lora_B.to(x.dtype)).add_(y).view(shape)
    h = torch.mm(x, slot.lora_A.to(x.dtype).t())
    return torch.addmm(y, h, slot.lora_B.to(x.dtype).t(), alpha=slot.scaling).view(shape)


def add_lora_(y_TN: Tensor, x_TK: Tensor, slot: LoRASlot) -> Tensor:
    """`add_lora` into y itself, which may be some columns of a wider tensor. Not for gradients."""
    if panels.can_multiply(x_TK, x_TK.shape[1]):
        h = panels.linear(x_TK, slot.lora_A.to(x_TK.dtype)).mul_(slot.scaling)
        return y_TN.add_(panels.linear(h, slot.lora_B.to(x_TK.dtype)))
    h = torch.mm(x_TK, slot.lora_A.to(x_TK.dtype).t())
    return y_TN.addmm_(h, slot.lora_B.to(x_TK.dtype).t(), alpha=slot.scaling)
