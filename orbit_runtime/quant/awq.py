"""AWQ INT4 (`version: gemm`), read only: `qweight`, `qzeros`, `scales`. The bits are rearranged; nothing is rounded.

`qweight` int32 `[K, N/8]` and `qzeros` int32 `[K/g, N/8]` pack eight *rows* of the weight per word, interleaved:
nibble `ORDER[i]` holds row 8j+i. Codes and zero points are unsigned 0..15; `scales` F16 `[K/g, N]`. Oracle for the
layout: compressed-tensors' `AutoAWQConverter`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from orbit_runtime.errors import ModelError
from orbit_runtime.quant.checks import DAMAGED, check_matrix, check_scale, take
from orbit_runtime.quant.int4 import CODES_PER_WORD, pack, unpack
from orbit_runtime.quant.int4_asymmetric import INT4AsymmetricWeight, pack_zero_points

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def tensor_names(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{part}" for part in ("qweight", "qzeros", "scales"))


def from_checkpoint(tensors: Mapping[str, Tensor], name: str) -> INT4AsymmetricWeight:
    """The weight of module `name`, after checking that its tensors are consistent."""
    names = tensor_names(name)
    qweight, qzeros, scales = take(tensors, names)
    check_matrix(qweight, (torch.int32,), None, names[0])
    columns, rows = qweight.shape[0], qweight.shape[1] * CODES_PER_WORD
    check_matrix(scales, (torch.float16, torch.bfloat16), None, names[2])
    groups = scales.shape[0]
    if scales.shape[1] != rows or columns % groups or (columns // groups) % CODES_PER_WORD:
        raise ModelError(
            f"scales {list(scales.shape)} do not fit {rows} rows of {columns} columns", where=names[2], fix=DAMAGED
        )
    check_matrix(qzeros, (torch.int32,), (groups, rows // CODES_PER_WORD), names[1])
    check_scale(scales, names[2])
    codes, zeros = _in_order(unpack(qweight)), _in_order(unpack(qzeros))
    return INT4AsymmetricWeight(pack(codes.t()), scales.t().contiguous(), pack_zero_points(zeros.t()))


def _in_order(codes: Tensor) -> Tensor:
    return codes.view(codes.shape[0], -1, CODES_PER_WORD)[:, :, list(ORDER)].flatten(1)
