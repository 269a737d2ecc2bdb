"""Products by a dense BF16 weight on a CPU with AVX512-BF16 and without AMX, by a kernel of Orbit's own (`linear.c`).

Belongs here: the weight's order and the call. Does not belong here: which layers use it (`linear`, the output layer).
oneDNN's product of few rows takes such a processor a third longer; with AMX oneDNN's is the faster one.
"""

from __future__ import annotations

from ctypes import CDLL, Structure, byref, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from orbit_runtime.quant.kernels.compiled import compiled, processor_flags

SOURCE = Path(__file__).with_name("linear.c")
PANEL = 48
"""Columns of a result that are computed together."""


class _Linear(Structure):
    """`Linear` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "w", "bias", "y")),
        *((name, c_int64) for name in ("x_row", "y_row", "w_row", "rows", "columns", "depth")),
        *((name, c_int32) for name in ("is_turned", "y_is_fp32", "threads")),
    )


@cache
def kernel() -> CDLL | None:
    flags = processor_flags()
    return compiled(SOURCE) if "avx512_bf16" in flags and "amx_bf16" not in flags else None


def in_panels(weight_NK: Tensor) -> Tensor:
    """BF16 `[N / 48, K / 2, 48, 2]`, for K divisible by 2; rows are filled up with zeros."""
    filled = F.pad(weight_NK, (0, 0, 0, -len(weight_NK) % PANEL))
    return filled.view(-1, PANEL, filled.shape[1] // 2, 2).permute(0, 2, 1, 3).contiguous()


def of_panels(panels: Tensor, num_rows: int) -> Tensor:
    """The weight `[N, K]` again."""
    return panels.permute(0, 2, 1, 3).reshape(-1, panels.shape[1] * 2)[:num_rows]


def multiply(
    x_TK: Tensor, panels: Tensor, bias_N: Tensor | None, *, columns: int, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """`x @ W.T + bias` `[T, N]` of BF16 factors, summed in fp32, in BF16 or fp32. A row has the same bits for any T.

    Args: columns: N.
    """
    return _product(x_TK, panels, columns, bias_N, dtype, is_turned=False)


def can_turn(dy_TN: Tensor, weight_NK: Tensor) -> bool:
    is_bf16_on_a_cpu = dy_TN.dtype is weight_NK.dtype is torch.bfloat16 and dy_TN.device.type == "cpu"
    return is_bf16_on_a_cpu and dy_TN.shape[-1] % 2 == 0 and kernel() is not None


def multiply_turned(dy_TN: Tensor, weight_NK: Tensor) -> Tensor:
    """`dy @ W` `[T, K]` in BF16, for N divisible by 2, of a weight as it is saved: panels are made in passing."""
    return _product(dy_TN, weight_NK, weight_NK.shape[1], None, torch.bfloat16, is_turned=True)


def _product(
    x: Tensor, weight: Tensor, columns: int, bias: Tensor | None, dtype: torch.dtype, *, is_turned: bool
) -> Tensor:
    assert x.dtype is weight.dtype is torch.bfloat16, "the kernel reads pairs of BF16 numbers"
    x, weight = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, weight))
    y = x.new_empty(len(x), columns, dtype=dtype)
    places = x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()
    sizes = x.stride(0), columns, weight.stride(0), len(x), columns, x.shape[1]
    how = is_turned, dtype is torch.float32, torch.get_num_threads()
    kernel().multiply(byref(_Linear(*places, *sizes, *how)))  # type: ignore[union-attr]
    return y
