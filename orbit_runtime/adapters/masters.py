"""The trainer's side of an adapter: fp32 master parameters, and the published rounding that a pass multiplies by.

Belongs here: masters, ties between projections that share an input, rounding with a straight-through gradient.
Does not belong here: optimisers, files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.layer import Slot
from orbit_runtime.adapters.lora import LoRASlot
from orbit_runtime.adapters.oft import OFTSlot, rotations


class _Rounded(torch.autograd.Function):
    """Round to BF16 and widen again; the gradient passes straight through. Many tensors in one node of the graph."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        rounded = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(torch.bfloat16).to(dtype)
        parts = rounded.split_with_sizes([tensor.numel() for tensor in tensors])
        return tuple(part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(grad.float() for grad in grads))


@dataclass(frozen=True, eq=False)
class Masters:
    """The masters of every layer, and how layers share them.

    Layers that share an input share one OFT parameter: `owner[layer]` names the layer that holds it.
    """

    config: AdapterConfig
    parameters: Mapping[str, nn.Parameter]
    """`<module>.lora_A`, `<module>.lora_B` or, for owners only, `<module>.oft_R`; fp32, sorted by name."""
    owner: Mapping[str, str]

    def applied(self, compute_dtype: torch.dtype) -> dict[str, Slot]:
        """Every layer's slot as it would be after a publish, with gradient to the masters."""
        if self.config.type == "LoRA":
            rounded = dict(zip(self.parameters, _Rounded.apply(compute_dtype, *self.parameters.values()), strict=True))
            return {
                name: LoRASlot(rounded[f"{name}.lora_A"], rounded[f"{name}.lora_B"], self.config.scaling)
                for name in self.owner
            }
        R = self.rotations()
        if self.config.rotation_dtype == "BF16":
            R = dict(zip(R, _Rounded.apply(compute_dtype, *R.values()), strict=True))
        return {name: OFTSlot(R[owner]) for name, owner in self.owner.items()}

    def rotations(self) -> dict[str, Tensor]:
        """fp32 R of every owner, in one batch: trainer and publish both call this, so that they get the same bits."""
        counts = [parameter.shape[0] for parameter in self.parameters.values()]
        config = self.config
        stacked = rotations(
            torch.cat(list(self.parameters.values())), config.block_size, config.parametrization, config.neumann_terms
        )
        return dict(
            zip((key.removesuffix(".oft_R") for key in self.parameters), torch.split(stacked, counts), strict=True)
        )
