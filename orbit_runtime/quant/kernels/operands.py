"""Packed tensors in the form that kernels read: the checkpoint's memory under other dtypes, nothing copied.

Does not import Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = {
    "INT4": "INT4", "INT4Asymmetric": "INT4Asymmetric", "FP8": "FP8Row", "FP8Block": "FP8Block",
    "FP8BlockCT": "FP8Block", "FP8BlockV4": "FP8Block", "NVFP4": "NVFP4", "NVFP4ModelOpt": "NVFP4ModelOpt",
    "MXFP4": "MXFP4", "MXFP4V4": "MXFP4", "MXFP4GptOss": "MXFP4",
}  # fmt: skip
"""Layout → kind of decoding. GPTQ and AWQ are `INT4Asymmetric` once loaded; BF16 needs no kernel."""
BYTE_KINDS = ("FP8Tensor", "FP8Row", "FP8Block")
GROUPS = {"NVFP4": 16, "NVFP4ModelOpt": 16, "MXFP4": 32, "FP8Block": 128}
_AS_BITS = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
    torch.int32: torch.uint8,
    torch.int8: torch.uint8,
}


@dataclass(frozen=True, slots=True)
class WeightForm:
    """Everything about a weight except its tensors; hashable, so that launch decisions are cached by it."""

    kind: str
    group: int
    num_experts: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """A weight for kernels: the tensors are views of the checkpoint's."""

    form: WeightForm
    codes: Tensor
    scale: Tensor
    extra: Tensor
    """The scale again if the kind has no third tensor."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.codes, self.scale, self.extra


def build_operands(layout: str, buffers: Sequence[Tensor], *, stacked: bool = False) -> Operands | None:
    """Operands of a weight, or None if no kernel reads it: BF16, or tensors that are not contiguous.

    Args:
        buffers: the packed tensors in the order of the codec's `buffers`; with the expert axis first if `stacked`.
    """
    kind = KINDS.get(layout)
    if kind is None or not all(tensor.is_contiguous() for tensor in buffers):
        return None
    codes, scale = buffers[0], buffers[1]
    per_word = codes.itemsize
    count = codes.shape[0] if stacked else 1
    rows = codes.shape[-2]
    columns = codes.shape[-1] * per_word * (1 if kind == "FP8Row" or kind == "FP8Block" else 2)
    if kind == "FP8Row" and scale.numel() == count:
        kind = "FP8Tensor"
    group = GROUPS.get(kind, columns if kind in BYTE_KINDS else columns // scale.shape[-1])
    codes, scale = (tensor.view(_AS_BITS.get(tensor.dtype, tensor.dtype)) for tensor in (codes, scale))
    extra = buffers[2] if len(buffers) > 2 else scale
    return Operands(WeightForm(kind, group, count, rows, columns), codes, scale, extra)
