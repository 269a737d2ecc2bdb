"""GPTQ INT4, read only: `qweight`, `qzeros`, `scales`, `g_idx`. The bits are rearranged; no value is rounded again.

`qweight` int32 `[K/8, N]` holds column 8j+i of a row in bits 4i..4i+3; `qzeros` int32 `[K/g, N/8]` holds the zero point
minus one (`checkpoint_format: gptq`) or the zero point itself (`gptq_v2`); `scales` F16 `[K/g, N]`. Codes are unsigned
0..15. Oracle: GPTQModel's `dequantize_weight` with its scales in F32, rounded to BF16, bit for bit.

Version 1: GPTQModel writes it by subtracting 0x11111111 from whole words, so a zero point of 0 borrows from its
neighbour. Adding the same number to the word restores all eight; adding one to each nibble would not. A symmetric
file has no zero point of 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from orbit_runtime.errors import ModelError
from orbit_runtime.quant.checks import DAMAGED, check_groups, check_matrix, check_scale, take
from orbit_runtime.quant.int4 import CODES_PER_WORD, unpack
from orbit_runtime.quant.int4_asymmetric import INT4AsymmetricWeight, pack_zero_points

ONE_IN_EACH = 0x11111111


def tensor_names(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))


def from_checkpoint(tensors: Mapping[str, Tensor], name: str, *, zero_offset: int = 1) -> INT4AsymmetricWeight:
    """The weight of module `name`; `zero_offset` is what must be added to the file's zero points, 1 or 0."""
    names = tensor_names(name)
    qweight, qzeros, scales, g_idx = take(tensors, names)
    check_matrix(qweight, (torch.int32,), None, names[0])
    columns, rows = qweight.shape[0] * CODES_PER_WORD, qweight.shape[1]
    check_groups(rows, CODES_PER_WORD, names[0])
    check_matrix(scales, (torch.float16, torch.bfloat16), None, names[2])
    groups = scales.shape[0]
    if scales.shape[1] != rows or columns % groups or (columns // groups) % CODES_PER_WORD:
        raise ModelError(
            f"scales {list(scales.shape)} do not fit {rows} rows of {columns} columns", where=names[2], fix=DAMAGED
        )
    check_matrix(qzeros, (torch.int32,), (groups, rows // CODES_PER_WORD), names[1])
    check_scale(scales, names[2])
    in_order = torch.arange(columns, device=g_idx.device) // (columns // groups)
    if g_idx.shape != in_order.shape or not torch.equal(g_idx.to(torch.int64), in_order):
        raise ModelError(
            "the columns are not in the order of their groups (`desc_act`)",
            where=names[3],
            fix="use a checkpoint made without activation order",
        )
    zeros = unpack(qzeros + zero_offset * ONE_IN_EACH)
    return INT4AsymmetricWeight(qweight.t().contiguous(), scales.t().contiguous(), pack_zero_points(zeros.t()))


def from_checkpoint_v2(tensors: Mapping[str, Tensor], name: str) -> INT4AsymmetricWeight:
    """`checkpoint_format: gptq_v2`."""
    return from_checkpoint(tensors, name, zero_offset=0)
