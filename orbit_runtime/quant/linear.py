"""A linear layer over a frozen, packed weight: the gradient reaches the input and nothing else.

Belongs here: multiplying by packed weights, forward and backward, with bounded temporaries.
Does not belong here: formats (one file each), adapters, anything trainable.
Shapes: x `[..., K]`, weight `[N, K]`, result `[..., N]`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from orbit_runtime.quant.formats import FORMATS, Weight, format_of

DENSE_BYTES_LIMIT = {"cpu": 16 << 20, "cuda": 256 << 20}
"""Most bytes of dequantised weight, in the compute dtype, that exist at a time: larger matrices go by runs of rows.

On a CPU a run of this size stays in the cache between being dequantised and multiplied: it is also the faster way.
"""

DenseRows = Callable[..., Tensor]


class FrozenLinear(nn.Module):
    """`x @ W.T + bias` with W packed. The packed tensors are buffers under their checkpoint names.

    Computes in `x.dtype`. `.to(device)` moves the buffers; `.to(dtype)` leaves them alone, because a packed tensor that
    changed its dtype would be another weight.
    """

    def __init__(self, weight: Weight, bias: Tensor | None = None, *, dense_bytes: int | None = None) -> None:
        super().__init__()
        self.dense_bytes = dense_bytes
        """Most dequantised bytes at a time; None: `DENSE_BYTES_LIMIT` of the device."""
        self.format = format_of(weight)
        self.out_features, self.in_features = weight.shape
        codec = FORMATS[self.format]
        self._codec_views, self._dense_rows = codec.views, codec.dense_rows
        self._packed_names = tuple(codec.buffers(weight))
        self._seen: list[Tensor | None] = []
        self._views: tuple[Tensor, ...] = ()
        for name, tensor in codec.buffers(weight).items():
            self.register_buffer(name, tensor)
        self.register_buffer("bias", bias)

    @property
    def packed(self) -> Weight:
        """The weight as the format's dataclass; shares the buffers."""
        tensors = {name: getattr(self, name) for name in self._packed_names}
        weight: Weight = FORMATS[self.format].from_buffers(tensors)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        packed = self._packed_views()
        bias = self._buffers["bias"]
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        if x.requires_grad and torch.is_grad_enabled():
            result: Tensor = _FrozenMatmul.apply(x, bias, self._dense_rows, self.dense_bytes, *packed)
            return result
        return forward_by_rows(x, bias, self._dense_rows, self.dense_bytes, packed)

    def product(self, x: Tensor, dense: Tensor) -> Tensor:
        """`forward` for x `[T, K]` without gradient, on a layer that no longer moves, through a buffer of the caller's.

        Args:
            dense: `[at least N·K]` in x's dtype; overwritten. New memory at every call would cost more than the values.
        """
        bias, size = self._buffers["bias"], self.out_features * self.in_features
        if size > len(dense):
            return self.forward(x)
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        w = dense[:size].view(self.out_features, self.in_features)
        # Widening the BF16 value is what `dense_rows` does for a wider dtype.
        w.copy_(self._dense_rows(*(self._views or self._packed_views()), torch.bfloat16))
        return nn.functional.linear(x, w, bias)

    def views(self) -> tuple[Tensor, ...]:
        """The packed tensors as `dense` takes them."""
        return self._packed_views()

    def dense(self, views: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The whole weight `[N, K]`."""
        return self._dense_rows(*views, dtype)

    def _packed_views(self) -> tuple[Tensor, ...]:
        """Made anew when a buffer is another tensor than before: making them at every call costs while decoding."""
        buffers = [self._buffers[name] for name in self._packed_names]
        if len(self._seen) != len(buffers) or any(map(operator.is_not, buffers, self._seen)):
            self._views, self._seen = self._codec_views(*buffers), buffers
        return self._views

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenLinear:
        for name, buffer in self._buffers.items():
            if buffer is not None:
                moved = fn(buffer)
                self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        return self

    def extra_repr(self) -> str:
        bias = self._buffers["bias"] is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format}, bias={bias}"


def share_rows(linears: Sequence[FrozenLinear]) -> FrozenLinear | None:
    """One linear whose outputs are those of `linears` side by side, over the same packed bytes.

    The members' buffers become runs of rows of its own, so nothing stands in memory twice. None where the packed
    tensors cannot stand under each other: other formats, other columns, or a format with no `stack`.
    """
    first = linears[0]
    if len(linears) == 1:
        return first
    stack = FORMATS[first.format].stack
    alike = all((each.format, each.in_features) == (first.format, first.in_features) for each in linears)
    biased = [each.bias is not None for each in linears]
    weight = stack([each.packed for each in linears]) if stack and alike and len(set(biased)) == 1 else None
    if weight is None:
        return None
    bias = torch.cat([each.bias for each in linears]) if all(biased) else None  # type: ignore[misc]
    whole = FrozenLinear(weight, bias, dense_bytes=first.dense_bytes)
    start = 0
    for each in linears:
        for name in each._packed_names:
            each._buffers[name] = getattr(whole, name)[start : start + each.out_features]
        start += each.out_features
    return whole


class _FrozenMatmul(torch.autograd.Function):
    """Saves the packed tensors only: neither x nor a dense weight outlives the call."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, dense_rows: DenseRows, dense_bytes: int | None, *packed: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*packed)
        ctx.settings = (x.shape[-1], dense_rows, dense_bytes)
        return forward_by_rows(x, bias, dense_rows, dense_bytes, packed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        packed = ctx.saved_tensors
        num_columns, dense_rows, dense_bytes = ctx.settings
        return (
            backward_by_rows(dy, num_columns, dense_rows, dense_bytes, packed),
            None,
            None,
            None,
            *(None for _ in packed),
        )


def forward_by_rows(
    x: Tensor, bias: Tensor | None, dense_rows: DenseRows, dense_bytes: int | None, packed: Sequence[Tensor]
) -> Tensor:
    """`x @ W.T + bias`; `packed` are the codec's `views`. Outside of autograd."""
    num_rows, dtype = packed[0].shape[0], x.dtype
    run = _rows_per_run(num_rows, x.shape[-1], x, dense_bytes)
    if run >= num_rows:
        return nn.functional.linear(x, dense_rows(*packed, dtype), bias)
    flat_x = x.reshape(-1, x.shape[-1])
    y = flat_x.new_empty(flat_x.shape[0], num_rows)
    for start in range(0, num_rows, run):
        rows = [tensor[start : start + run] for tensor in packed]
        torch.mm(flat_x, dense_rows(*rows, dtype).t(), out=y[:, start : start + run])
    if bias is not None:
        y += bias
    return y.view(*x.shape[:-1], num_rows)


def backward_by_rows(
    dy: Tensor, num_columns: int, dense_rows: DenseRows, dense_bytes: int | None, packed: Sequence[Tensor]
) -> Tensor:
    """`dy @ W`, the gradient of the input."""
    num_rows, dtype = packed[0].shape[0], dy.dtype
    run = _rows_per_run(num_rows, num_columns, dy, dense_bytes)
    if run >= num_rows:
        return dy @ dense_rows(*packed, dtype)
    flat_dy = dy.reshape(-1, num_rows)
    dx = flat_dy.new_zeros(flat_dy.shape[0], num_columns)
    for start in range(0, num_rows, run):
        rows = [tensor[start : start + run] for tensor in packed]
        dx.addmm_(flat_dy[:, start : start + run], dense_rows(*rows, dtype))
    return dx.view(*dy.shape[:-1], num_columns)


def _rows_per_run(num_rows: int, num_columns: int, like: Tensor, dense_bytes: int | None) -> int:
    if dense_bytes is None:
        dense_bytes = DENSE_BYTES_LIMIT["cuda" if like.is_cuda else "cpu"]
    fitting = dense_bytes // (num_columns * like.itemsize)
    return num_rows if fitting >= num_rows else max(fitting, 1)
