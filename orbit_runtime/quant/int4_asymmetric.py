"""INT4 with a zero point per group: compressed-tensors `pack-quantized`, asymmetric; GPTQ and AWQ convert to it.

Oracle: compressed-tensors' `decompress`, bit for bit. Order of operations: `bf16(float32(q - z) * float32(scale))`. The
difference has 5 bits and a scale at most 11, so the product is exact in fp32 and BF16 rounds once. F16 scales (GPTQ,
AWQ) are widened, never rounded to BF16 first; their oracle is the same `decompress` over the widened scales.

Belongs here: the format. Does not belong here: the symmetric format (`int4`), other vendors' packing (`gptq`, `awq`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from orbit_runtime.errors import ModelError
from orbit_runtime.quant import e2m1, int4
from orbit_runtime.quant.checks import (
    DAMAGED,
    check_groups,
    check_matrix,
    check_scale,
    read_shape,
    take,
    times_scales,
)

CODES_PER_WORD = int4.CODES_PER_WORD
SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class INT4AsymmetricWeight:
    """A weight of shape `[N, K]` (out, in), exactly as the checkpoint stores it.

    qdata: int32 `[N, K/8]`, code of column 8j+i in bits 4i..4i+3 of word j (`weight_packed`)
    scale: bfloat16, float16 or float32 `[N, K/block_size]` (`weight_scale`)
    zero_point: int32 `[ceil(N/8), K/block_size]`, that of row 8j+i in bits 4i..4i+3 (`weight_zero_point`)
    """

    qdata: Tensor
    scale: Tensor
    zero_point: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return (self.qdata.shape[0], self.qdata.shape[1] * CODES_PER_WORD)

    @property
    def block_size(self) -> int:
        return self.shape[1] // self.scale.shape[1]


def tensor_names(prefix: str) -> tuple[str, ...]:
    parts = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
    return tuple(f"{prefix}.{part}" for part in parts)


def from_checkpoint(tensors: Mapping[str, Tensor], name: str) -> INT4AsymmetricWeight:
    """The weight of module `name` from its checkpoint tensors, unchanged, after checking that they are consistent."""
    names = tensor_names(name)
    qdata, scale, zero_point, shape = take(tensors, names)
    rows, columns = read_shape(shape, names[3])
    check_groups(columns, CODES_PER_WORD, names[0])
    check_matrix(qdata, (torch.int32,), (rows, columns // CODES_PER_WORD), names[0])
    check_matrix(scale, SCALE_DTYPES, None, names[1])
    groups = scale.shape[1]
    if scale.shape[0] != rows or columns % groups or (columns // groups) % CODES_PER_WORD:
        raise ModelError(
            f"scales {list(scale.shape)} do not fit {rows} rows of {columns} columns packed by {CODES_PER_WORD}",
            where=names[1],
            fix=DAMAGED,
        )
    check_matrix(zero_point, (torch.int32,), (-(-rows // CODES_PER_WORD), groups), names[2])
    check_scale(scale, names[1])
    _check_trailing(zero_point, rows, names[2])
    return INT4AsymmetricWeight(qdata, scale, zero_point)


def quantize(w: Tensor, group: int) -> INT4AsymmetricWeight:
    """compressed-tensors' rule in BF16: `scale = (max - min) / 15`, `z = round(-8 - min / scale)`."""
    rows, columns = w.shape
    assert columns % group == 0, (columns, group)
    grouped = w.to(torch.bfloat16).view(rows, columns // group, group)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scale = (high - low) / 15.0
    # Without a spread, -8 - 0/0 is undefined: the zero point is then the smallest code.
    zero = torch.clamp(torch.where(scale == 0, -8, -8 - low / scale), -8, 7).round().to(torch.int8)
    scale = torch.where(scale == 0, torch.finfo(torch.bfloat16).eps, scale)
    scaled = grouped / scale.unsqueeze(-1) + zero.unsqueeze(-1).to(torch.bfloat16)
    codes = torch.round(torch.clamp(scaled, -8, 7)).to(torch.int8)
    return INT4AsymmetricWeight(int4.pack(codes.view(rows, columns)), scale, pack_zero_points(zero))


def pack_zero_points(zero: Tensor) -> Tensor:
    """int8 zero points -8..7 `[N, G]` → int32 `[ceil(N/8), G]`; bits of rows past the end are 0."""
    padding = -zero.shape[0] % CODES_PER_WORD
    padded = torch.nn.functional.pad(zero.t(), (0, padding), value=-int4.ZERO_CODE)
    return int4.pack(padded).t().contiguous()


def views(qdata: Tensor, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, ...]:
    """Words, scales, the index of each row, and all zero points expanded (without memory) to each row."""
    rows = qdata.shape[0]
    numbers = torch.arange(rows, dtype=torch.int32, device=qdata.device)
    return qdata.view(torch.uint16), scale, numbers, zero_point.unsqueeze(0).expand(rows, *zero_point.shape)


def dense_rows(qdata: Tensor, scale: Tensor, numbers: Tensor, zero_point: Tensor) -> Tensor:
    """BF16 `[rows, K]` from the `views` of any run of rows."""
    rows, groups = scale.shape
    words = zero_point[0].index_select(0, numbers // CODES_PER_WORD)
    shifts = (numbers % CODES_PER_WORD * 4).unsqueeze(-1)
    zeros = ((words >> shifts) & 15) - int4.ZERO_CODE
    codes = e2m1.unpack(qdata, int4.VALUES).view(rows, groups, -1).sub_(zeros.bfloat16().unsqueeze(-1))
    return times_scales(codes.view(rows, -1), scale.float())


def dequantize(weight: INT4AsymmetricWeight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return dense_rows(*views(weight.qdata, weight.scale, weight.zero_point)).to(dtype)


def buffers(weight: INT4AsymmetricWeight) -> dict[str, Tensor]:
    """The packed tensors by checkpoint name, relative to the module, in the order that `views` takes."""
    return {"weight_packed": weight.qdata, "weight_scale": weight.scale, "weight_zero_point": weight.zero_point}


def from_buffers(tensors: Mapping[str, Tensor]) -> INT4AsymmetricWeight:
    return INT4AsymmetricWeight(tensors["weight_packed"], tensors["weight_scale"], tensors["weight_zero_point"])


def num_bytes(weight: INT4AsymmetricWeight) -> int:
    return weight.qdata.nbytes + weight.scale.nbytes + weight.zero_point.nbytes


def tiles(weight: INT4AsymmetricWeight) -> dict[str, tuple[int, int] | None]:
    """Rows and columns covered by one element of each packed tensor."""
    group = weight.block_size
    return {
        "weight_packed": (1, CODES_PER_WORD),
        "weight_scale": (1, group),
        "weight_zero_point": (CODES_PER_WORD, group),
    }


def to_checkpoint(weight: INT4AsymmetricWeight) -> dict[str, Tensor]:
    """The tensors of this weight in a file, relative to the module."""
    return buffers(weight) | {"weight_shape": torch.tensor(weight.shape)}


def _check_trailing(zero_point: Tensor, rows: int, where: str) -> None:
    """Bits past the last row must be 0: otherwise the shape or the tensor belongs to another weight."""
    used = rows % CODES_PER_WORD
    if used and bool(((zero_point[-1] >> (4 * used)) & ((1 << (32 - 4 * used)) - 1)).any()):
        raise ModelError(f"bits are set past the last of {rows} rows", where=where, fix=DAMAGED)
