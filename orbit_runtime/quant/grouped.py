"""One projection of all experts over tokens sorted by expert: only the input gets a gradient.

Belongs here: the grouped product in torch, forward and backward: one dense expert at a time, and only those with
tokens, or BF16 experts all at once. Does not belong here: routing and sorting, adapters, formats.

Legend: `T` tokens, `E` experts, each with a weight `[N, K]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from orbit_runtime.quant.activations import Rounding, scaled
from orbit_runtime.quant.experts import ExpertStack
from orbit_runtime.quant.formats import FORMATS, Weight, format_of
from orbit_runtime.quant.kernels.choice import select_path
from orbit_runtime.quant.kernels.dense import EXPERT_DENSE_BYTES, grouped_dense, is_aligned
from orbit_runtime.quant.kernels.operands import build_operands
from orbit_runtime.quant.linear import backward_by_rows, forward_by_rows
from orbit_runtime.quant.saved_products import computed_once


class GroupedProduct(Protocol):
    """An implementation of the product of each token with its expert's packed tensors. Outside of autograd."""

    def forward(self, x_TK: Tensor, offsets_E: Tensor, packed: Sequence[Tensor]) -> Tensor:
        """`[T, N]`; 0 for tokens without an expert."""

    def input_gradient(self, dy_TN: Tensor, offsets_E: Tensor, packed: Sequence[Tensor]) -> Tensor:
        """`[T, K]`."""


@dataclass(frozen=True, slots=True)
class TorchGroupedProduct:
    """One expert after another, using its codec. `packed`: a stack's tensors, or those of all experts, concatenated."""

    layout: str
    rows: int
    columns: int
    dense_bytes: int | None

    def forward(self, x_TK: Tensor, offsets_E: Tensor, packed: Sequence[Tensor]) -> Tensor:
        y_TN, dense_rows = x_TK.new_zeros(len(x_TK), self.rows), FORMATS[self.layout].dense_rows
        for start, stop, views in _experts(offsets_E, len(x_TK), self.layout, packed):
            y_TN[start:stop] = forward_by_rows(x_TK[start:stop], None, dense_rows, self.dense_bytes, views)
        return y_TN

    def input_gradient(self, dy_TN: Tensor, offsets_E: Tensor, packed: Sequence[Tensor]) -> Tensor:
        dx_TK, dense_rows = dy_TN.new_zeros(len(dy_TN), self.columns), FORMATS[self.layout].dense_rows
        for start, stop, views in _experts(offsets_E, len(dy_TN), self.layout, packed):
            rows = backward_by_rows(dy_TN[start:stop], self.columns, dense_rows, self.dense_bytes, views)
            dx_TK[start:stop] = rows
        return dx_TK


@dataclass(frozen=True, slots=True)
class StackedGroupedProduct:
    """BF16 experts unchanged, in a single torch product; `packed` is `[E, N, K]`. The host reads nothing."""

    def forward(self, x_TK: Tensor, offsets_E: Tensor, packed: Sequence[Tensor]) -> Tensor:
        return grouped_dense(x_TK, packed[0].transpose(1, 2), offsets_E)

    def input_gradient(self, dy_TN: Tensor, offsets_E: Tensor, packed: Sequence[Tensor]) -> Tensor:
        return grouped_dense(dy_TN, packed[0], offsets_E)


def grouped_linear(
    x_TK: Tensor,
    weights: ExpertStack | Sequence[Weight],
    offsets_E: Tensor,
    *,
    dense_bytes: int | None = None,
    rounding: Rounding | None = None,
    keeps: bool = False,
) -> Tensor:
    """`y[t] = x[t] @ W[expert of t].T`, in x's dtype, `[T, N]`.

    Args:
        weights: of one layout and shape. A sequence is used as is; only a stack can use a fused kernel.
        offsets_E: int32 or int64; the tokens of expert e are `offsets[e-1]` (0 for the first) to `offsets[e]`, as in
            `torch.nn.functional.grouped_mm`. Tokens after the last offset give 0 and get no gradient.
        dense_bytes: maximum dequantised bytes at a time; None for the device's `linear.DENSE_BYTES_LIMIT`.
        rounding: rounding of x as in an engine's kernel; one without a static scale.
        keeps: if a layer's second pass reuses products of its first, whether this is one of them (`computed_once`).
    """
    assert x_TK.ndim == 2, x_TK.shape
    assert offsets_E.ndim == 1, offsets_E.shape
    product, packed = _product(x_TK, weights, dense_bytes)
    if rounding is not None:
        product = _RoundedGroupedProduct(product, rounding)
    if x_TK.requires_grad and torch.is_grad_enabled():
        result: Tensor = _GroupedMatmul.apply(x_TK, offsets_E, product, keeps, *packed)
        return result
    compute = partial(product.forward, x_TK, offsets_E, packed)
    return computed_once(compute) if keeps else compute()


@dataclass(frozen=True, slots=True)
class _RoundedGroupedProduct:
    inner: GroupedProduct
    rounding: Rounding

    def forward(self, x_TK: Tensor, offsets_E: Tensor, packed: Sequence[Tensor]) -> Tensor:
        values_TK, factor = self.rounding(x_TK)
        y_TN = self.inner.forward(values_TK, offsets_E, packed)
        return y_TN if factor is None else scaled(y_TN, factor, None)

    def input_gradient(self, dy_TN: Tensor, offsets_E: Tensor, packed: Sequence[Tensor]) -> Tensor:
        return self.inner.input_gradient(dy_TN, offsets_E, packed)


class _GroupedMatmul(torch.autograd.Function):
    """Saves only the packed tensors and the offsets: neither x nor a dense weight outlives the call."""

    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, offsets_E: Tensor, product: GroupedProduct, keeps: bool, *packed: Tensor
    ) -> Tensor:
        ctx.save_for_backward(offsets_E, *packed)
        ctx.product = product
        compute = partial(product.forward, x_TK, offsets_E, packed)
        return computed_once(compute) if keeps else compute()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        offsets_E, *packed = ctx.saved_tensors
        return (ctx.product.input_gradient(dy_TN, offsets_E, packed), None, None, None, *(None for _ in packed))


def _product(
    x_TK: Tensor, weights: ExpertStack | Sequence[Weight], dense_bytes: int | None
) -> tuple[GroupedProduct, tuple[Tensor, ...]]:
    """The implementation selected by `choice`, and the packed tensors in the form that it reads."""
    layout, tensors = _flat(weights)
    if isinstance(weights, ExpertStack):
        (rows, columns), stacked = weights.shape, True
    else:
        (rows, columns), stacked = weights[0].shape, False
    if stacked and layout == "BF16" and x_TK.dtype is torch.bfloat16 and is_aligned(rows, columns):
        return StackedGroupedProduct(), tensors
    # The decision depends on the number of tokens that share an expert's weight.
    per_expert = len(x_TK) // max(1, tensors[0].shape[0]) if stacked else 0
    path = select_path(layout, x_TK.device, x_TK.dtype, per_expert, grouped=True)
    operands = build_operands(layout, tensors, stacked=True) if stacked and path != "Torch" else None
    if operands is None:
        return TorchGroupedProduct(layout, rows, columns, dense_bytes), tensors
    from orbit_runtime.quant.kernels.products import DequantizedGroupedProduct, FusedGroupedProduct

    if path == "Dequantize" and is_aligned(rows, columns):
        return DequantizedGroupedProduct(operands.form, dense_bytes or EXPERT_DENSE_BYTES), operands.tensors
    return FusedGroupedProduct(operands.form), operands.tensors


def _experts(
    offsets_E: Tensor, num_tokens: int, name: str, tensors: Sequence[Tensor]
) -> Iterator[tuple[int, int, tuple[Tensor, ...]]]:
    """First token, end and packed views of every expert with tokens."""
    start = 0
    for index, stop in enumerate(offsets_E.tolist()):
        assert start <= stop <= num_tokens, (start, stop, num_tokens)
        if stop > start:
            yield start, stop, FORMATS[name].views(*_buffers(name, tensors, index))
        start = stop


def _flat(weights: ExpertStack | Sequence[Weight]) -> tuple[str, tuple[Tensor, ...]]:
    """The layout, and all packed tensors: stacked ones have one axis more than those of a single weight
    (`_buffers`)."""
    if isinstance(weights, ExpertStack):
        return weights.format, tuple(weights.tensors.values())
    formats = {format_of(weight) for weight in weights}
    assert len(formats) == 1, formats
    (name,) = formats
    return name, tuple(tensor for weight in weights for tensor in FORMATS[name].buffers(weight).values())


def _buffers(name: str, tensors: Sequence[Tensor], index: int) -> tuple[Tensor, ...]:
    """The packed tensors of one expert; the codes of every layout are a matrix, so three axes mean a stack."""
    if tensors[0].ndim == 3:
        return tuple(tensor[index] for tensor in tensors)
    count = sum(not part.endswith("weight_shape") for part in FORMATS[name].tensor_names(""))
    return tuple(tensors[index * count : (index + 1) * count])
