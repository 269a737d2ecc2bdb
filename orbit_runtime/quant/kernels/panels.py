"""Products by a dense BF16 weight on a CPU with AVX512-BF16 and without AMX, by a kernel of Orbit's own (`linear.c`).

Belongs here: the weight's order and the call. Does not belong here: which layers use it (`linear`, the output layer).
oneDNN's product of few rows takes such a processor a third longer; with AMX oneDNN's is the faster one.
"""

from __future__ import annotations

from ctypes import CDLL, Structure, byref, c_float, c_int32, c_int64, c_void_p
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
        *((name, c_void_p) for name in ("x", "w", "bias", "x2", "w2", "first", "y")),
        *((name, c_int64) for name in ("x_row", "y_row", "w_row", "x2_row", "w2_row", "first_row")),
        *((name, c_int64) for name in ("rows", "columns", "depth", "depth2")),
        ("by", c_float),
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
    x_TK: Tensor,
    panels: Tensor,
    bias_N: Tensor | None,
    *,
    columns: int,
    dtype: torch.dtype = torch.bfloat16,
    lora: tuple[Tensor, Tensor, float] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`x @ W.T + bias` `[T, N]` of BF16 factors, summed in fp32, in BF16 or fp32. A row has the same bits for any T.

    Args:
        columns: N.
        lora: A `[R, K]`, B transposed `[R, N]` and the scaling: `scaling * (x @ A.T)`, in BF16, times B is part of each
            sum.
        out: `[T, N]` of this dtype, to write to.
    """
    out = x_TK.new_empty(len(x_TK), columns, dtype=dtype) if out is None else out
    if lora is None:
        return _product(x_TK, panels, bias_N, out)
    first_RK, second_RN, by = lora
    between_TR = x_TK.new_empty(len(x_TK), len(first_RK))
    return _product(x_TK, panels, bias_N, out, (between_TR, second_RN), first_RK, by)


def can_turn(dy_TN: Tensor, weight_NK: Tensor) -> bool:
    is_bf16_on_a_cpu = dy_TN.dtype is weight_NK.dtype is torch.bfloat16 and dy_TN.device.type == "cpu"
    return is_bf16_on_a_cpu and dy_TN.shape[-1] % 2 == 0 and kernel() is not None


def multiply_turned(dy_TN: Tensor, weight_NK: Tensor, added: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """`dy @ W` `[T, K]` in BF16, for N divisible by 2, of a weight as it is saved: panels are made in passing.

    Args: added: factors `[T, R]` and `[R, K]` of a product that is part of each sum.
    """
    out = dy_TN.new_empty(len(dy_TN), weight_NK.shape[1])
    return _product(dy_TN, weight_NK, None, out, added, is_turned=True)


def _product(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor,
    added: tuple[Tensor, Tensor] | None = None,
    first: Tensor | None = None,
    by: float = 1.0,
    *,
    is_turned: bool = False,
) -> Tensor:
    given = [None if each is None else plain(each) for each in (x, w, bias, *(added or (None, None)), first)]
    held = [each for each in given if each is not None]
    assert all(each.dtype is torch.bfloat16 for each in held), "the kernel reads pairs of BF16 numbers"
    x, w, _, x2, w2, first = given
    places = (None if each is None else each.data_ptr() for each in (*given, out))
    strides = (0 if each is None else each.stride(0) for each in (x, out, w, x2, w2, first))
    sizes = *out.shape, x.shape[1], 0 if x2 is None else x2.shape[1]
    how = is_turned, out.dtype is torch.float32, torch.get_num_threads()
    kernel().multiply(byref(_Linear(*places, *strides, *sizes, by, *how)))  # type: ignore[union-attr]
    return out


def plain(x: Tensor) -> Tensor:
    """As kernels read rows: a row's numbers lie one after the other."""
    return x if x.stride(-1) == 1 else x.contiguous()
