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
        *((name, c_void_p) for name in ("x", "w", "bias", "x2", "w2", "y")),
        *((name, c_int64) for name in ("x_row", "y_row", "w_row", "x2_row", "w2_row")),
        *((name, c_int64) for name in ("rows", "columns", "depth", "depth2")),
        ("by", c_float),
        *((name, c_int32) for name in ("is_turned", "y_is_fp32", "threads")),
    )


Added = tuple[Tensor, Tensor] | None
"""A second product `x2 @ W2`, added before a sum is rounded: x2 `[T, R]`, W2 `[R, N]`."""


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
    added: Added = None,
    out: Tensor | None = None,
) -> Tensor:
    """`x @ W.T + bias` `[T, N]` of BF16 factors, summed in fp32, in BF16 or fp32. A row has the same bits for any T.

    Args:
        columns: N.
        out: `[T, N]` of this dtype, to write to.
    """
    out = x_TK.new_empty(len(x_TK), columns, dtype=dtype) if out is None else out
    return _product(x_TK, panels, bias_N, out, added, is_turned=False)


def can_turn(dy_TN: Tensor, weight_NK: Tensor) -> bool:
    is_bf16_on_a_cpu = dy_TN.dtype is weight_NK.dtype is torch.bfloat16 and dy_TN.device.type == "cpu"
    return is_bf16_on_a_cpu and dy_TN.shape[-1] % 2 == 0 and kernel() is not None


def multiply_turned(dy_TN: Tensor, weight_NK: Tensor, added: Added = None) -> Tensor:
    """`dy @ W` `[T, K]` in BF16, for N divisible by 2, of a weight as it is saved: panels are made in passing."""
    out = dy_TN.new_empty(len(dy_TN), weight_NK.shape[1])
    return _product(dy_TN, weight_NK, None, out, added, is_turned=True)


def multiply_narrow(x_TK: Tensor, weight_NK: Tensor, by: float, out: Tensor | None = None) -> Tensor:
    """`by * x @ W.T` `[T, N]` in BF16, for few N, of a weight as it is saved."""
    x_TK, weight_NK = map(_plain, (x_TK, weight_NK))
    out = x_TK.new_empty(len(x_TK), len(weight_NK)) if out is None else out
    kernel().multiply_narrow(byref(_linear(x_TK, weight_NK, None, out, None, by)))  # type: ignore[union-attr]
    return out


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, added: Added, *, is_turned: bool
) -> Tensor:
    x, weight = map(_plain, (x, weight))
    added = None if added is None else (_plain(added[0]), _plain(added[1]))
    kernel().multiply(byref(_linear(x, weight, bias, out, added, 1.0, is_turned)))  # type: ignore[union-attr]
    return out


def _linear(
    x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, added: Added, by: float, is_turned: bool = False
) -> _Linear:
    read = (x, w, *(() if bias is None else (bias,)), *(added or ()))
    assert all(each.dtype is torch.bfloat16 for each in read), "the kernel reads pairs of BF16 numbers"
    places = (None if each is None else each.data_ptr() for each in (x, w, bias, *(added or (None, None)), out))
    strides = x.stride(0), out.stride(0), w.stride(0), *(each.stride(0) for each in added or (x, x))
    sizes = *out.shape, x.shape[1], added[0].shape[1] if added else 0
    return _Linear(*places, *strides, *sizes, by, is_turned, out.dtype is torch.float32, torch.get_num_threads())


def _plain(x: Tensor) -> Tensor:
    """The kernel reads a row's numbers one after the other."""
    return x if x.stride(-1) == 1 else x.contiguous()
