"""INT4: compressed-tensors `pack-quantized`, symmetric, one BF16 scale per group of columns of a row.

Oracle: compressed-tensors' own `decompress`, bit for bit. Order of operations: `bf16(float32(q) * float32(scale))`, one
rounding to nearest even (a BF16 multiplication does exactly this); wider dtypes widen that BF16 value, which is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orbit_runtime.errors import ModelError
from orbit_runtime.quant import e2m1
from orbit_runtime.quant.checks import DAMAGED, check_groups, check_matrix, check_scale, read_shape, take

CODES_PER_WORD = 8
ZERO_CODE = 8
"""Codes are stored offset binary: 0..15 for -8..7."""
VALUES = tuple(range(-ZERO_CODE, ZERO_CODE))


@dataclass(frozen=True, slots=True, eq=False)
class INT4Weight:
    """A weight of shape `[N, K]` (out, in), exactly as the checkpoint stores it.

    qdata: int32 `[N, K/8]`, code of column 8j+i in bits 4i..4i+3 of word j (`weight_packed`)
    scale: bfloat16 `[N, K/block_size]` (`weight_scale`)
    """

    qdata: Tensor
    scale: Tensor
    shape: tuple[int, int]
    block_size: int


def tensor_names(prefix: str) -> tuple[str, ...]:
    """Checkpoint names of the module's tensors."""
    return (f"{prefix}.weight_packed", f"{prefix}.weight_scale", f"{prefix}.weight_shape")


def from_checkpoint(tensors: Mapping[str, Tensor], name: str) -> INT4Weight:
    """The weight of module `name` from its checkpoint tensors, unchanged, after checking that they are consistent."""
    names = tensor_names(name)
    packed_key, scale_key, shape_key = names
    qdata, scale, shape = take(tensors, names)
    rows, columns = read_shape(shape, shape_key)
    check_groups(columns, CODES_PER_WORD, packed_key)
    check_matrix(qdata, (torch.int32,), (rows, columns // CODES_PER_WORD), packed_key)
    check_matrix(scale, (torch.bfloat16,), None, scale_key)
    groups = scale.shape[1]
    if scale.shape[0] != rows or columns % groups or (columns // groups) % CODES_PER_WORD:
        raise ModelError(
            f"scales {list(scale.shape)} do not fit {rows} rows of {columns} columns packed by {CODES_PER_WORD}",
            where=scale_key,
            fix=DAMAGED,
        )
    check_scale(scale, scale_key)
    return INT4Weight(qdata, scale, (rows, columns), columns // groups)


def pack(codes: Tensor) -> Tensor:
    """int8 codes -8..7 `[N, K]` → int32 words `[N, K/8]`."""
    rows, columns = codes.shape
    stored = (codes.to(torch.int32) + ZERO_CODE).view(rows, columns // CODES_PER_WORD, CODES_PER_WORD)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
    # The nibbles do not overlap, so the (wrapping) sum of the shifted codes equals their bitwise or.
    return (stored << shifts).sum(-1, dtype=torch.int32)


def unpack(qdata: Tensor) -> Tensor:
    """int32 words `[N, K/8]` → int8 codes -8..7 `[N, K]`."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=qdata.device)
    return (((qdata.unsqueeze(-1) >> shifts) & 15) - ZERO_CODE).to(torch.int8).flatten(1)


def quantize(w: Tensor, group: int) -> INT4Weight:
    """Quantises by compressed-tensors' rule: `scale = amax / 7.5` per group, `q = round(clamp(w / scale, -8, 7))`.

    Computes in BF16, as compressed-tensors does for a BF16 model; the scale of a group of zeros is BF16's epsilon.
    Only for making checkpoints: a frozen base is never quantised again.
    """
    rows, columns = w.shape
    assert columns % group == 0, (columns, group)
    assert group % CODES_PER_WORD == 0, group
    grouped = w.to(torch.bfloat16).view(rows, columns // group, group)
    scale = grouped.abs().amax(-1) / 7.5
    scale = torch.where(scale == 0, torch.finfo(torch.bfloat16).eps, scale)
    codes = torch.round(torch.clamp(grouped / scale.unsqueeze(-1), -8, 7)).to(torch.int8)
    return INT4Weight(pack(codes.view(rows, columns)), scale, (rows, columns), group)


def views(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The packed tensors in the form that `dense_rows` reads, sharing memory: uint16 `[N, K/4]`, scales `[N, K/g,
    1]`."""
    return qdata.view(torch.uint16), scale.unsqueeze(-1)


def dense_rows(qdata: Tensor, scale: Tensor) -> Tensor:
    """BF16 `[rows, K]` from the `views` of any run of rows. Uses few operations, because each costs while decoding."""
    rows, groups, _ = scale.shape
    return e2m1.unpack(qdata, VALUES).view(rows, groups, -1).mul_(scale).view(rows, -1)


def dequantize(weight: INT4Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Dense `[N, K]`. If that is too large to hold, process it by rows as `FrozenLinear` does."""
    return dense_rows(*views(weight.qdata, weight.scale)).to(dtype)


def buffers(weight: INT4Weight) -> dict[str, Tensor]:
    """The packed tensors by checkpoint name, relative to the module, in the order that `dense_rows` takes."""
    return {"weight_packed": weight.qdata, "weight_scale": weight.scale}


def from_buffers(tensors: Mapping[str, Tensor]) -> INT4Weight:
    qdata, scale = tensors["weight_packed"], tensors["weight_scale"]
    columns = qdata.shape[1] * CODES_PER_WORD
    return INT4Weight(qdata, scale, (qdata.shape[0], columns), columns // scale.shape[1])


def num_bytes(weight: INT4Weight) -> int:
    return weight.qdata.nbytes + weight.scale.nbytes


def stack(weights: Sequence[INT4Weight]) -> INT4Weight | None:
    """The rows of several weights, concatenated; None if their groups differ."""
    first = weights[0]
    if any(weight.block_size != first.block_size for weight in weights):
        return None
    qdata, scale = torch.cat([weight.qdata for weight in weights]), torch.cat([weight.scale for weight in weights])
    return INT4Weight(qdata, scale, (qdata.shape[0], first.shape[1]), first.block_size)
