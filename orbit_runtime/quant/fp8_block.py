"""FP8 in blocks of 128 x 128: DeepSeek-V3, Qwen3-FP8, DeepSeek-V4's dense layers, compressed-tensors' `FP8_BLOCK`.

Oracle: transformers' `Fp8Dequantize`, bit for bit; for a partial last block, which it refuses, compressed-tensors'
`FP8BlockDequantizer`. Order of operations: `bf16(float32(q) * float32(scale))`, one fp32 product (rounded once) and one
rounding to BF16; wider dtypes widen that BF16 value. Multiplying in BF16, as some code does, rounds an F32 scale first
and gives a different weight. Despite its name, `weight_scale_inv` multiplies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from orbit_runtime.quant.checks import check_codes, check_matrix, check_scale, e4m3_values, take, times_scales

BLOCK = 128
MAX = 448.0
"""Largest E4M3 value."""
SCALE_NAMES = {"FP8Block": "weight_scale_inv", "FP8BlockCT": "weight_scale", "FP8BlockV4": "scale"}
"""Layout → name of the scale in its files: Hugging Face's fp8, compressed-tensors, DeepSeek-V4."""
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


@dataclass(frozen=True, slots=True, eq=False)
class FP8BlockWeight:
    """A weight of shape `[N, K]` (out, in), exactly as the checkpoint stores it.

    qdata: float8_e4m3fn `[N, K]`
    scale: float32, bfloat16 or float8_e8m0fnu `[ceil(N/128), ceil(K/128)]`
    """

    qdata: Tensor
    scale: Tensor
    layout: str = "FP8Block"

    @property
    def shape(self) -> tuple[int, int]:
        return (self.qdata.shape[0], self.qdata.shape[1])

    @property
    def block_size(self) -> int:
        return BLOCK


def tensor_names(prefix: str, layout: str = "FP8Block") -> tuple[str, str]:
    return (f"{prefix}.weight", f"{prefix}.{SCALE_NAMES[layout]}")


def from_checkpoint(tensors: Mapping[str, Tensor], name: str, layout: str = "FP8Block") -> FP8BlockWeight:
    """The weight of module `name` from its checkpoint tensors, unchanged, after checking that they are consistent."""
    names = tensor_names(name, layout)
    qdata, scale = take(tensors, names)
    check_matrix(qdata, (torch.float8_e4m3fn,), None, names[0])
    check_codes(qdata, names[0])
    rows, columns = qdata.shape
    check_matrix(scale, SCALE_DTYPES, (-(-rows // BLOCK), -(-columns // BLOCK)), names[1])
    check_scale(scale, names[1])
    return FP8BlockWeight(qdata, scale, layout)


def quantize(w: Tensor, layout: str = "FP8Block") -> FP8BlockWeight:
    """`scale = amax / 448` per block in fp32, `q = e4m3(w / scale)`; a block of zeros gets scale 1."""
    rows, columns = w.shape
    padded = torch.nn.functional.pad(w.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    amax = blocks.abs().amax((1, 3))
    # A subnormal quotient would lose the block, so the smallest scale is the smallest normal number.
    scale = torch.where(amax == 0, 1.0, (amax / MAX).clamp(min=torch.finfo(torch.float32).tiny))
    codes = (blocks / scale[:, None, :, None]).clamp(-MAX, MAX).to(torch.float8_e4m3fn)
    return FP8BlockWeight(codes.view(padded.shape)[:rows, :columns].contiguous(), scale, layout)


def views(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, the block row of each row, and the whole scale expanded (without memory) to each row."""
    rows = qdata.shape[0]
    block_rows = torch.arange(rows, dtype=torch.int32, device=qdata.device) // BLOCK
    return qdata, block_rows, scale.unsqueeze(0).expand(rows, *scale.shape)


def dense_rows(qdata: Tensor, block_rows: Tensor, scale: Tensor) -> Tensor:
    """BF16 `[rows, K]` from the `views` of any run of rows."""
    columns = qdata.shape[1]
    by_row = scale[0].float().index_select(0, block_rows)
    if columns % BLOCK:
        by_row = by_row.repeat_interleave(BLOCK, dim=1)[:, :columns]
    return times_scales(e4m3_values(qdata), by_row)


def dequantize(weight: FP8BlockWeight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return dense_rows(*views(weight.qdata, weight.scale)).to(dtype)


def buffers(weight: FP8BlockWeight) -> dict[str, Tensor]:
    """The packed tensors by checkpoint name, relative to the module, in the order that `views` takes."""
    return {"weight": weight.qdata, SCALE_NAMES[weight.layout]: weight.scale}


def from_buffers(tensors: Mapping[str, Tensor]) -> FP8BlockWeight:
    layout = next(layout for layout, name in SCALE_NAMES.items() if name in tensors)
    return FP8BlockWeight(tensors["weight"], tensors[SCALE_NAMES[layout]], layout)


def num_bytes(weight: FP8BlockWeight) -> int:
    return weight.qdata.nbytes + weight.scale.nbytes


def tiles(weight: FP8BlockWeight) -> dict[str, tuple[int, int] | None]:
    """Rows and columns covered by one element of each packed tensor."""
    return {"weight": (1, 1), SCALE_NAMES[weight.layout]: (BLOCK, BLOCK)}


def to_checkpoint(weight: FP8BlockWeight) -> dict[str, Tensor]:
    """The tensors of this weight in a file, relative to the module."""
    return buffers(weight)
