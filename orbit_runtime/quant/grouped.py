"""One projection of all experts over tokens that are sorted by expert: the gradient reaches the input, nothing else.

Belongs here: the grouped product in torch, forward and backward, one expert dense at a time, and only those that got
tokens. Does not belong here: routing and sorting, adapters, formats.

Legend: `T` tokens, `E` experts, weight of each `[N, K]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from orbit_runtime.quant.experts import ExpertStack
from orbit_runtime.quant.formats import FORMATS, Weight, format_of
from orbit_runtime.quant.linear import backward_by_rows, forward_by_rows


def grouped_linear(
    x_TK: Tensor, weights: ExpertStack | Sequence[Weight], offsets_E: Tensor, *, dense_bytes: int | None = None
) -> Tensor:
    """`y[t] = x[t] @ W[expert of t].T`, in x's dtype, `[T, N]`.

    Args:
        weights: of one layout and shape. A sequence is taken as it is; only a stack can go through a fused kernel.
        offsets_E: int32 or int64; the tokens of expert e are `offsets[e-1]` (0 for the first) up to `offsets[e]`, as
            `torch.nn.functional.grouped_mm` has it. Tokens after the last offset give 0 and get no gradient.
        dense_bytes: most dequantised bytes at a time; None: `linear.DENSE_BYTES_LIMIT` of the device.
    """
    name, tensors = _flat(weights)
    assert x_TK.ndim == 2, x_TK.shape
    assert offsets_E.ndim == 1, offsets_E.shape
    result: Tensor = _GroupedMatmul.apply(x_TK, offsets_E, name, dense_bytes, *tensors)
    return result


class _GroupedMatmul(torch.autograd.Function):
    """Saves the packed tensors and the offsets: neither x nor a dense weight outlives the call."""

    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, offsets_E: Tensor, name: str, dense_bytes: int | None, *tensors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(offsets_E, *tensors)
        ctx.settings = (x_TK.shape[1], name, dense_bytes)
        codec, y_TN = FORMATS[name], None
        for start, stop, packed in _experts(offsets_E, len(x_TK), name, tensors):
            y = forward_by_rows(x_TK[start:stop], None, codec.dense_rows, dense_bytes, packed)
            y_TN = y.new_zeros(len(x_TK), y.shape[1]) if y_TN is None else y_TN
            y_TN[start:stop] = y
        if y_TN is None:
            rows = codec.views(*_buffers(name, tensors, 0))[0].shape[0]
            y_TN = x_TK.new_zeros(len(x_TK), rows)
        return y_TN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        offsets_E, *tensors = ctx.saved_tensors
        num_columns, name, dense_bytes = ctx.settings
        dx_TK = dy_TN.new_zeros(len(dy_TN), num_columns)
        for start, stop, packed in _experts(offsets_E, len(dy_TN), name, tensors):
            rows = backward_by_rows(dy_TN[start:stop], num_columns, FORMATS[name].dense_rows, dense_bytes, packed)
            dx_TK[start:stop] = rows
        return (dx_TK, None, None, None, *(None for _ in tensors))


def _experts(
    offsets_E: Tensor, num_tokens: int, name: str, tensors: Sequence[Tensor]
) -> Iterator[tuple[int, int, tuple[Tensor, ...]]]:
    """First token, end and packed views of every expert that has tokens."""
    start = 0
    for index, stop in enumerate(offsets_E.tolist()):
        assert start <= stop <= num_tokens, (start, stop, num_tokens)
        if stop > start:
            yield start, stop, FORMATS[name].views(*_buffers(name, tensors, index))
        start = stop


def _flat(weights: ExpertStack | Sequence[Weight]) -> tuple[str, tuple[Tensor, ...]]:
    """The layout, and all packed tensors: stacked ones have one axis more than a single weight's (`_buffers`)."""
    if isinstance(weights, ExpertStack):
        return weights.format, tuple(weights.tensors.values())
    formats = {format_of(weight) for weight in weights}
    assert len(formats) == 1, formats
    (name,) = formats
    return name, tuple(tensor for weight in weights for tensor in FORMATS[name].buffers(weight).values())


def _buffers(name: str, tensors: Sequence[Tensor], index: int) -> tuple[Tensor, ...]:
    """The packed tensors of one expert; the codes of every layout are a matrix, so three axes are a stack."""
    if tensors[0].ndim == 3:
        return tuple(tensor[index] for tensor in tensors)
    count = _num_tensors(name)
    return tuple(tensors[index * count : (index + 1) * count])


def _num_tensors(name: str) -> int:
    return len([part for part in FORMATS[name].tensor_names("") if not part.endswith("weight_shape")])
