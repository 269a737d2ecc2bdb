"""FP8 with one scale per row or per tensor: compressed-tensors `float-quantized`, ModelOpt `FP8`. Same tensor names.

Oracle: compressed-tensors' `decompress`, rounded to BF16, bit for bit: `bf16(float32(q) * float32(scale))`, one fp32
product and one rounding; wider dtypes widen that BF16 value. ModelOpt's own `dequantize` to BF16 rounds the F32 scale
to BF16 first, but engines that serve its files multiply by the F32 scale, so the F32 product is right for them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from orbit_runtime.errors import ModelError
from orbit_runtime.quant.checks import (
    DAMAGED,
    check_codes,
    check_matrix,
    check_scale,
    e4m3_values,
    take,
    times_scales,
)
from orbit_runtime.quant.fp8_block import MAX

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class FP8Weight:
    """A weight of shape `[N, K]` (out, in), exactly as the checkpoint stores it.

    qdata: float8_e4m3fn `[N, K]` (`weight`)
    scale: float32, bfloat16 or float16, `[N, 1]` or `[N]` per row, `[]` or `[1]` per tensor (`weight_scale`)
    """

    qdata: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return (self.qdata.shape[0], self.qdata.shape[1])

    @property
    def block_size(self) -> int:
        return self.qdata.shape[1]

    @property
    def per_tensor(self) -> bool:
        return self.scale.numel() == 1


def tensor_names(prefix: str) -> tuple[str, str]:
    return (f"{prefix}.weight", f"{prefix}.weight_scale")


def from_checkpoint(tensors: Mapping[str, Tensor], name: str) -> FP8Weight:
    """The weight of module `name` from its checkpoint tensors, unchanged, after checking that they are consistent."""
    names = tensor_names(name)
    qdata, scale = take(tensors, names)
    check_matrix(qdata, (torch.float8_e4m3fn,), None, names[0])
    check_codes(qdata, names[0])
    rows = qdata.shape[0]
    if scale.dtype not in SCALE_DTYPES or list(scale.shape) not in ([], [1], [1, 1], [rows], [rows, 1]):
        raise ModelError(
            f"expected one float scale, or one for each of {rows} rows, found {scale.dtype} {list(scale.shape)}",
            where=names[1],
            fix=DAMAGED,
        )
    check_scale(scale, names[1])
    return FP8Weight(qdata, scale)


def quantize(w: Tensor, *, per_tensor: bool = False) -> FP8Weight:
    """`scale = bf16(amax / 448)` per row (or tensor), `q = e4m3(w / scale)`; rows of zeros get scale 1.

    Readers that load a model in BF16 round its scales to BF16, so others would give them other weights.
    """
    w = w.float()
    amax = w.abs().amax().view(1, 1) if per_tensor else w.abs().amax(1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, (amax / MAX).clamp(min=torch.finfo(torch.float32).tiny)).bfloat16().float()
    qdata = (w / scale).clamp(-MAX, MAX).to(torch.float8_e4m3fn)
    return FP8Weight(qdata, scale.view(1) if per_tensor else scale)


def views(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    rows = qdata.shape[0]
    return qdata, scale.reshape(1, 1).expand(rows, 1) if scale.numel() == 1 else scale.view(rows, 1)


def dense_rows(qdata: Tensor, scale: Tensor) -> Tensor:
    """BF16 `[rows, K]` from the `views` of any run of rows."""
    return times_scales(e4m3_values(qdata), scale.float())


def dequantize(weight: FP8Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return dense_rows(*views(weight.qdata, weight.scale)).to(dtype)


def buffers(weight: FP8Weight) -> dict[str, Tensor]:
    """The packed tensors by checkpoint name, relative to the module, in the order that `views` takes."""
    return {"weight": weight.qdata, "weight_scale": weight.scale}


def from_buffers(tensors: Mapping[str, Tensor]) -> FP8Weight:
    return FP8Weight(tensors["weight"], tensors["weight_scale"])


def num_bytes(weight: FP8Weight) -> int:
    return weight.qdata.nbytes + weight.scale.nbytes


def tiles(weight: FP8Weight) -> dict[str, tuple[int, int] | None]:
    """Rows and columns covered by one element of each packed tensor; 0: all columns; None: the whole weight."""
    return {"weight": (1, 1), "weight_scale": None if weight.per_tensor else (1, 0)}


def to_checkpoint(weight: FP8Weight) -> dict[str, Tensor]:
    """The tensors of this weight in a file, relative to the module."""
    return buffers(weight)
