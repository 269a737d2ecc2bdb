"""Products by a dense weight on a CPU with AVX512, by a kernel of Orbit's own (`linear.c`): a row has the same bits for
any number of rows.

Belongs here: the weight's order and the call. Does not belong here: which layers use it (`linear`, the output layer).
In BF16 oneDNN's product of few rows takes a third longer, but with AMX it is the faster one. MKL's of fp32 takes such a
processor of AMD twice as long.
"""

from __future__ import annotations

from ctypes import CDLL, Structure, byref, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
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
        ("by2", c_float),
        *((name, c_int32) for name in ("layout", "is_bf16", "y_is_fp32", "threads")),
    )


IN_PANELS, TURNED, SAVED = range(3)
"""How a weight lies; see the source."""


@cache
def kernel(dtype: torch.dtype) -> CDLL | None:
    """The product of factors of this dtype."""
    flags = processor_flags()
    if dtype is torch.float32:
        return compiled(SOURCE) if "avx512bw" in flags else None
    fits = dtype is torch.bfloat16 and "avx512_bf16" in flags and "amx_bf16" not in flags
    found = compiled(SOURCE) if fits else None
    # A compiler may know less than the processor.
    return found if found is not None and found.has_bf16() else None


def can_multiply(x: Tensor, depth: int) -> bool:
    """Whether the kernel takes factors like these. Args: depth: products of a sum."""
    is_whole = x.dtype is torch.float32 or depth % 2 == 0
    return x.device.type == "cpu" and is_whole and kernel(x.dtype) is not None


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, **adds: Any) -> Tensor:
    """`torch.nn.functional.linear`, outside of autograd, by the kernel where it takes such factors.

    Args: adds: `lora` of `multiply`, where it does and x is `[T, K]`.
    """
    if not can_multiply(x, weight_NK.shape[1]) or weight_NK.dtype is not x.dtype:
        return F.linear(x, weight_NK, bias_N)
    y = multiply(x.reshape(-1, x.shape[-1]), weight_NK, bias_N, **adds)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], len(weight_NK))


def product(x: Tensor, weight_NK: Tensor) -> Tensor:
    """`linear` with gradients of both."""
    result: Tensor = _Product.apply(x, weight_NK)
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor) -> Tensor:
        # For the gradient of each, the other.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight_NK if ctx.needs_input_grad[0] else None)
        return linear(x, weight_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, weight_NK), dy_TN = ctx.saved_tensors, dy.flatten(0, -2)
        dx = None if weight_NK is None else torch.mm(dy_TN, weight_NK).view(*dy.shape[:-1], weight_NK.shape[1])
        return dx, None if x is None else summed(dy_TN, x.flatten(0, -2))


def in_panels(weight_NK: Tensor) -> Tensor:
    """BF16 `[N / 48, K / 2, 48, 2]`, for K divisible by 2; rows are filled up with zeros."""
    filled = F.pad(weight_NK, (0, 0, 0, -len(weight_NK) % PANEL))
    return filled.view(-1, PANEL, filled.shape[1] // 2, 2).permute(0, 2, 1, 3).contiguous()


def of_panels(panels: Tensor, num_rows: int) -> Tensor:
    """The weight `[N, K]` again."""
    return panels.permute(0, 2, 1, 3).reshape(-1, panels.shape[1] * 2)[:num_rows]


def multiply(
    x_TK: Tensor,
    weight: Tensor,
    bias_N: Tensor | None = None,
    *,
    columns: int | None = None,
    dtype: torch.dtype | None = None,
    lora: tuple[Tensor, Tensor, float] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`x @ W.T + bias` `[T, N]` of factors of one dtype, summed in fp32. A row has the same bits for any T.

    Args:
        weight: `[N, K]`, or as of `in_panels`.
        columns: N, of panels.
        dtype: of the result: fp32, or x's.
        lora: A `[R, K]`, B transposed `[R, N]` and the scaling: `scaling * (x @ A.T)`, in x's dtype, times B is part of
            each sum.
        out: `[T, N]` of this dtype, to write to.
    """
    if out is None:
        out = x_TK.new_empty(len(x_TK), len(weight) if columns is None else columns, dtype=dtype or x_TK.dtype)
    layout = IN_PANELS if weight.ndim > 2 else SAVED
    if lora is None:
        return _product(x_TK, weight, bias_N, out, layout)
    first_RK, second_RN, by = lora
    between_TR = x_TK.new_empty(len(x_TK), len(first_RK))
    return _product(x_TK, weight, bias_N, out, layout, (between_TR, second_RN), first_RK, (1.0, by))


def multiply_turned(dy_TN: Tensor, weight_NK: Tensor, added: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """`dy @ W` `[T, K]` in dy's dtype, of a weight as it is saved.

    Args: added: factors `[T, R]` and `[R, K]` of a product that is part of each sum.
    """
    return _product(dy_TN, weight_NK, None, dy_TN.new_empty(len(dy_TN), weight_NK.shape[1]), TURNED, added)


def few(x_TK: Tensor, weight_RK: Tensor, by: float) -> Tensor:
    """`by * x @ W.T` `[T, R]`, for few rows of W."""
    if not can_multiply(x_TK, x_TK.shape[1]):
        return torch.mm(x_TK, weight_RK.t()).mul_(by)
    return _product(x_TK, weight_RK, None, x_TK.new_empty(len(x_TK), len(weight_RK)), SAVED, by=(by, 1.0))


def summed(a_TR: Tensor, b_TK: Tensor) -> Tensor:
    """`a.T @ b` `[R, K]`, for few columns of a."""
    if not can_multiply(a_TR, 0):
        return torch.mm(a_TR.t(), b_TK)
    tokens, ranks = a_TR.shape
    # The kernel reads rows in pairs of BF16 numbers.
    rows_RT = a_TR.new_zeros(ranks, tokens + tokens % 2)
    rows_RT[:, :tokens] = a_TR.t()
    return _product(rows_RT[:, :tokens], b_TK, None, b_TK.new_empty(ranks, b_TK.shape[1]), TURNED)


def _product(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor,
    layout: int,
    added: tuple[Tensor, Tensor] | None = None,
    first: Tensor | None = None,
    by: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    given = [None if each is None else plain(each) for each in (x, w, bias, *(added or (None, None)), first)]
    assert all(each is None or each.dtype is x.dtype for each in given), "the kernel reads numbers of one dtype"
    x, w, _, x2, w2, first = given  # type: ignore[assignment]
    places = [None if each is None else each.data_ptr() for each in (*given, out)]
    strides = [0 if each is None else each.stride(0) for each in (x, out, w, x2, w2, first)]
    sizes = *out.shape, x.shape[1], 0 if x2 is None else x2.shape[1]
    how = layout, x.dtype is torch.bfloat16, out.dtype is torch.float32, torch.get_num_threads()
    kernel(x.dtype).multiply(byref(_Linear(*places, *strides, *sizes, *by, *how)))  # type: ignore[union-attr]
    return out


def plain(x: Tensor) -> Tensor:
    """As kernels read rows: a row's numbers lie one after the other."""
    return x if x.stride(-1) == 1 else x.contiguous()
