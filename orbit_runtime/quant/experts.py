"""The weights of one projection of all experts of a layer, each packed tensor stacked along a leading expert axis.

Legend: `E` experts, each with a weight `[N, K]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from orbit_runtime.quant import mxfp4
from orbit_runtime.quant.formats import FORMATS, Weight


@dataclass(frozen=True, slots=True, eq=False)
class ExpertStack:
    """E weights of one layout and shape.

    Example: `ExpertStack("INT4", {"weight_packed": int32 [E, N, K/8], "weight_scale": bfloat16 [E, N, K/g]})`
    """

    format: str
    tensors: Mapping[str, Tensor]
    """Checkpoint name, relative to the module → `[E, …]`, in the order of the codec's `buffers`."""

    @property
    def num_experts(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """N and K of each expert."""
        rows, columns = self.expert(0).shape
        return rows, columns

    def expert(self, index: int) -> Weight:
        """One expert's weight; shares the memory."""
        parts = {name: tensor[index] for name, tensor in self.tensors.items()}
        weight: Weight = FORMATS[self.format].from_buffers(parts)
        return weight


def split_gpt_oss(weight: mxfp4.MXFP4Weight) -> ExpertStack:
    """Restores the expert axis of gpt-oss's tensors, which hold all experts of a layer; shares the memory."""
    rows = weight.shape[0] // weight.num_experts
    buffers = mxfp4.buffers(weight)
    return ExpertStack(weight.layout, {key: tensor.view(-1, rows, tensor.shape[1]) for key, tensor in buffers.items()})
