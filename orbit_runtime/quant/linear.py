"""A linear layer over a frozen, packed weight: only the input gets a gradient.

Belongs here: multiplying by packed weights, forward and backward, with bounded temporaries.
Does not belong here: formats (one file each), adapters, anything trainable.
Shapes: x `[..., K]`, weight `[N, K]`, result `[..., N]`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from orbit_runtime.quant import bf16
from orbit_runtime.quant.activations import RoundedProduct, Rounding, scaled
from orbit_runtime.quant.formats import FORMATS, Weight, format_of
from orbit_runtime.quant.kernels import panels
from orbit_runtime.quant.kernels.choice import Path, select_path
from orbit_runtime.quant.kernels.operands import build_operands
from orbit_runtime.quant.saved_products import computed_once

DENSE_BYTES_LIMIT = {"cpu": 16 << 20, "cuda": 256 << 20}
"""Maximum bytes of dequantised weight, in the compute dtype, at a time: larger matrices are processed in runs of rows.

On a CPU a run of this size stays in the cache between dequantising and multiplying, so it is also the faster way.
"""

ORDERED_ROWS = 64
"""Rows of a product for which weights are ordered: those of a decode step."""
CODEC_ELEMENTS = 1 << 20
"""Most elements that a codec dequantises at a time on a CPU, so that what it computes with stays in the cache."""

DenseRows = Callable[..., Tensor]


class Product(Protocol):
    """An implementation of multiplication by packed tensors, which are passed to every call. Outside of autograd."""

    def forward(self, x: Tensor, bias: Tensor | None, packed: Sequence[Tensor]) -> Tensor:
        """`x @ W.T + bias`."""

    def input_gradient(self, dy: Tensor, packed: Sequence[Tensor]) -> Tensor:
        """`dy @ W`."""


@dataclass(frozen=True, slots=True)
class TorchProduct:
    """The codec, then a torch matmul, in runs of rows. Packed tensors are the codec's `views`."""

    columns: int
    dense_rows: DenseRows
    dense_bytes: int | None

    def forward(self, x: Tensor, bias: Tensor | None, packed: Sequence[Tensor]) -> Tensor:
        return forward_by_rows(x, bias, self.dense_rows, self.dense_bytes, packed)

    def input_gradient(self, dy: Tensor, packed: Sequence[Tensor]) -> Tensor:
        return backward_by_rows(dy, self.columns, self.dense_rows, self.dense_bytes, packed)


class FrozenLinear(nn.Module):
    """`x @ W.T + bias` with W packed. The packed tensors are buffers under their checkpoint names.

    Computes in `x.dtype`. `.to(device)` moves the buffers; `.to(dtype)` does not change them, because a packed tensor
    with another dtype would be another weight.
    """

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None = None,
        *,
        dense_bytes: int | None = None,
        rounding: Rounding | None = None,
        input_scale: Tensor | None = None,
    ) -> None:
        """Args:
        rounding: rounding of x as in an engine's kernel. Its static scale, if it has one, is `input_scale`.
        """
        super().__init__()
        assert (rounding is not None and rounding.is_static) == (input_scale is not None)
        self.rounding = rounding
        self.dense_bytes = dense_bytes
        """Maximum dequantised bytes at a time; None for the device's `DENSE_BYTES_LIMIT`."""
        self.format = format_of(weight)
        self.out_features, self.in_features = weight.shape
        buffers = FORMATS[self.format].buffers(weight)
        self._packed_names = tuple(buffers)
        self._seen: list[Tensor | None] = []
        self._held: Tensor | None = None
        self.ordered: Tensor | None = None
        """See `order`."""
        self._kernels: dict[Path, tuple[Product, tuple[Tensor, ...]] | None] = {}
        self._read((), FORMATS[self.format].dense_rows)
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)
        self.register_buffer("bias", bias)
        if input_scale is not None:
            self.register_buffer("input_scale", input_scale)

    @property
    def packed(self) -> Weight:
        """The weight as the format's dataclass; shares the buffers."""
        tensors = {name: getattr(self, name) for name in self._packed_names}
        weight: Weight = FORMATS[self.format].from_buffers(tensors)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        packed = self._packed_views()
        product, packed = self._chosen_product(x, packed) if x.is_cuda else (self._product, packed)
        if self.rounding is not None:
            product = RoundedProduct(product, self.rounding)
            packed = (*packed, self._buffers["input_scale"]) if self.rounding.is_static else packed  # type: ignore[assignment]
        bias = self._buffers["bias"]
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        if x.requires_grad and torch.is_grad_enabled():
            result: Tensor = _FrozenMatmul.apply(x, bias, product, *packed)
            return result
        return computed_once(lambda: product.forward(x, bias, packed))

    def product(self, x: Tensor, dense: Tensor, **adds: Any) -> Tensor:
        """`forward` for x `[T, K]` without gradient, on a layer that no longer moves, using the caller's buffer.

        Args:
            dense: `[at least N·K]` in x's dtype; overwritten. Allocating memory on every call would cost more than the
                values.
            adds: `lora` of `panels.multiply`, for a layer that `takes_adds`.
        """
        bias, size = self._buffers["bias"], self.out_features * self.in_features
        if size > len(dense) and self.ordered is None:
            return self.forward(x)
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        if self.ordered is not None:
            return self._multiplied(x, self.ordered, bias, **adds)
        views = self._views or self._packed_views()
        w = dense_into(dense[:size].view(self.out_features, self.in_features), self._dense_rows, views)
        return self._multiplied(x, w, bias, **adds)

    def takes_adds(self, x: Tensor, dense: Tensor) -> bool:
        """Whether `product` adds LoRA before it rounds: by Orbit's kernel, all of the weight at once."""
        is_whole = self.ordered is not None or self.out_features * self.in_features <= len(dense)
        return is_whole and self.rounding is None and panels.can_multiply(x, self.in_features)

    def _multiplied(self, x: Tensor, w: Tensor, bias: Tensor | None, **adds: Any) -> Tensor:
        product: Callable[..., Tensor] = partial(panels.linear, **adds)
        if w is self.ordered:
            product = ordered_linear if w.is_mkldnn else partial(panels.multiply, columns=self.out_features, **adds)
        if self.rounding is None:
            return product(x, w, bias)
        x, factor = self.rounding(x, self._buffers.get("input_scale"))
        return product(x, w, bias) if factor is None else scaled(product(x, w, None), factor, bias)

    def order(self) -> bool:
        """Holds the dense BF16 weight once more, in the order in which Orbit's kernel or oneDNN reads it. Otherwise
        each product of few rows puts it in that order first, which takes as long as the product itself. Returns whether
        it does so: only of what is dense and BF16."""
        views = self._packed_views()
        if len(views) == 1 and views[0].dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            if panels.can_multiply(views[0], self.in_features):
                self.ordered = panels.in_panels(views[0])
            else:
                self.ordered = torch.ops.mkldnn._reorder_linear_weight(views[0], ORDERED_ROWS)
        return self.ordered is not None

    def input_gradient(self, dy: Tensor, added: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """`dy @ W` for dy `[T, N]`, plus the product of what is `added`, `[T, R]` and `[R, K]`; outside of autograd."""
        views = self._packed_views()
        if views[0].dtype is dy.dtype and panels.can_multiply(dy, self.out_features):
            return panels.multiply_turned(dy, views[0], added)
        dx = self._product.input_gradient(dy, views)
        return dx if added is None else dx.addmm_(*added)

    def widen(self, wide: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        """Holds the dense weight in `dtype`: the same values, no longer cast or dequantised at every call.

        Args: wide: gives a BF16 weight in that dtype, in place of which it is held.
        """
        if self.format == "BF16":
            self._buffers["weight"] = wide(self._buffers["weight"])  # type: ignore[arg-type]
        else:
            views = self._packed_views()
            dense = torch.empty(self.out_features, self.in_features, dtype=dtype)
            self._hold(dense_into(dense, self._dense_rows, views))

    def changed_copy(self) -> Tensor | None:
        """The dense copy if its bits are no longer those that the packed tensors stand for."""
        ordered = self.ordered
        if ordered is not None:
            ordered = ordered.to_dense() if ordered.is_mkldnn else panels.of_panels(ordered, self.out_features)
        for copy in (each for each in (self._held, ordered) if each is not None):
            right = FORMATS[self.format].dequantize(self.packed, copy.dtype)
            if not torch.equal(right.view(torch.uint8), copy.view(torch.uint8)):
                return copy
        return None

    def _hold(self, dense: Tensor) -> None:
        """Multiplies by this copy until a packed tensor is replaced: in the same runs of rows, to the same bits."""
        self._packed_views()
        self._held = dense
        self._read((dense,), bf16.dense_rows)

    def _read(self, views: tuple[Tensor, ...], dense_rows: DenseRows) -> None:
        self._views, self._dense_rows = views, dense_rows
        self._product: Product = TorchProduct(self.in_features, dense_rows, self.dense_bytes)

    def views(self) -> tuple[Tensor, ...]:
        """The packed tensors in the form that `dense` takes."""
        return self._packed_views()

    def dense(self, views: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The whole weight `[N, K]`."""
        return self._dense_rows(*views).to(dtype)

    def _packed_views(self) -> tuple[Tensor, ...]:
        """Rebuilt only when a buffer was replaced by another tensor: building them on every call is slow."""
        buffers = [self._buffers[name] for name in self._packed_names]
        if len(self._seen) != len(buffers) or any(map(operator.is_not, buffers, self._seen)):
            codec = FORMATS[self.format]
            self._read(codec.views(*buffers), codec.dense_rows)
            self._seen, self._held, self.ordered, self._kernels = buffers, None, None, {}
        return self._views

    def _chosen_product(self, x: Tensor, views: tuple[Tensor, ...]) -> tuple[Product, tuple[Tensor, ...]]:
        """The implementation selected by `choice`, and the packed tensors in the form that it reads."""
        path = select_path(self.format, x.device, x.dtype, x.numel() // max(x.shape[-1], 1))
        if path != "Torch" and path not in self._kernels:
            self._kernels[path] = self._kernel_product(path)
        return self._kernels.get(path) or (self._product, views)

    def _kernel_product(self, path: Path) -> tuple[Product, tuple[Tensor, ...]] | None:
        # Without Triton, `choice` never selects a kernel.
        from orbit_runtime.quant.kernels.products import DequantizedProduct, FusedProduct

        buffers = [getattr(self, name) for name in self._packed_names]
        operands = build_operands(self.format, buffers)
        if operands is None:
            return None
        if path == "Fused":
            return FusedProduct(operands.form), operands.tensors
        return DequantizedProduct(operands.form, self.dense_bytes or DENSE_BYTES_LIMIT["cuda"]), operands.tensors

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
    """One linear whose outputs are those of `linears`, concatenated, over the same packed bytes.

    The members' buffers, and what they hold dense, become runs of its rows, so nothing is stored twice. Where a format
    has no `stack`, it is one of what they hold dense in BF16. None if there is neither.
    """
    first = linears[0]
    if len(linears) == 1:
        return first
    stack = FORMATS[first.format].stack
    same = (first.format, first.in_features, first.rounding)
    alike = all((each.format, each.in_features, each.rounding) == same for each in linears)
    scales = [each.input_scale for each in linears if "input_scale" in each._buffers]
    alike = alike and all(torch.equal(scale, scales[0]) for scale in scales)
    biased = [each.bias is not None for each in linears]
    alike = alike and len(set(biased)) == 1
    weight = stack([each.packed for each in linears]) if stack and alike else None
    held = [each._held for each in linears if each._held is not None]
    is_packed, is_held = weight is not None, len(held) == len(linears)
    if weight is None and alike and is_held and held[0].dtype is torch.bfloat16:
        weight = bf16.BF16Weight(torch.cat(held))
    if weight is None:
        return None
    bias = torch.cat([each.bias for each in linears]) if all(biased) else None  # type: ignore[misc]
    whole = FrozenLinear(
        weight,
        bias,
        dense_bytes=first.dense_bytes,
        rounding=first.rounding,
        input_scale=scales[0] if scales else None,  # type: ignore[arg-type]
    )
    if is_packed and is_held:
        whole._hold(torch.cat(held))
    start = 0
    for each in linears:
        rows = slice(start, start + each.out_features)
        for name in each._packed_names if is_packed else ():
            each._buffers[name] = getattr(whole, name)[rows]
        if is_held:
            each._hold((whole._held if whole._held is not None else whole.weight)[rows])
        start = rows.stop
    return whole


def ordered_linear(x: Tensor, ordered: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` by a weight that is ordered already."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, ordered, bias, "none", [], "")
    return y


class _FrozenMatmul(torch.autograd.Function):
    """Saves only the packed tensors: neither x nor a dense weight outlives the call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, product: Product, *packed: Tensor) -> Tensor:
        ctx.save_for_backward(*packed)
        ctx.product = product
        return computed_once(lambda: product.forward(x, bias, packed))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        packed = ctx.saved_tensors
        return (ctx.product.input_gradient(dy, packed), None, None, *(None for _ in packed))


def forward_by_rows(
    x: Tensor, bias: Tensor | None, dense_rows: DenseRows, dense_bytes: int | None, packed: Sequence[Tensor]
) -> Tensor:
    """`x @ W.T + bias`; `packed` are the codec's `views`. Outside of autograd."""
    num_rows = packed[0].shape[0]
    dense = _buffer(num_rows, x.shape[-1], x, dense_bytes)
    if len(dense) == num_rows:
        return panels.linear(x, dense_into(dense, dense_rows, packed), bias)
    flat_x = x.reshape(-1, x.shape[-1])
    y = flat_x.new_empty(flat_x.shape[0], num_rows)
    for start in range(0, num_rows, len(dense)):
        rows = [tensor[start : start + len(dense)] for tensor in packed]
        w, out = dense_into(dense, dense_rows, rows), y[:, start : start + len(dense)]
        if panels.can_multiply(flat_x, x.shape[-1]):
            panels.multiply(flat_x, w, out=out)
        else:
            torch.mm(flat_x, w.t(), out=out)
    if bias is not None:
        y += bias
    return y.view(*x.shape[:-1], num_rows)


def backward_by_rows(
    dy: Tensor, num_columns: int, dense_rows: DenseRows, dense_bytes: int | None, packed: Sequence[Tensor]
) -> Tensor:
    """`dy @ W`, the gradient of the input."""
    num_rows = packed[0].shape[0]
    dense = _buffer(num_rows, num_columns, dy, dense_bytes)
    flat_dy = dy.reshape(-1, num_rows)
    if len(dense) == num_rows:
        whole = dense_into(dense, dense_rows, packed)
        product = panels.multiply_turned if panels.can_multiply(flat_dy, num_rows) else torch.mm
        return product(flat_dy, whole).view(*dy.shape[:-1], num_columns)
    dx = flat_dy.new_zeros(flat_dy.shape[0], num_columns)
    for start in range(0, num_rows, len(dense)):
        rows = [tensor[start : start + len(dense)] for tensor in packed]
        dx.addmm_(flat_dy[:, start : start + len(dense)], dense_into(dense, dense_rows, rows))
    return dx.view(*dy.shape[:-1], num_columns)


def dense_into(dense: Tensor, dense_rows: DenseRows, packed: Sequence[Tensor]) -> Tensor:
    """The rows that `packed` stands for, in the dtype of the buffer `dense` `[at least as many, K]`: in its first rows,
    or as they are if they are of that dtype."""
    num_rows = len(packed[0])
    if packed[0].dtype is dense.dtype:
        return packed[0]
    step = num_rows if dense.is_cuda else max(1, CODEC_ELEMENTS // dense.shape[1])
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        dense[start:stop].copy_(dense_rows(*(tensor[start:stop] for tensor in packed)))
    return dense[:num_rows]


def _buffer(num_rows: int, num_columns: int, like: Tensor, dense_bytes: int | None) -> Tensor:
    """For all rows, or for as many as `dense_bytes` hold."""
    if dense_bytes is None:
        dense_bytes = DENSE_BYTES_LIMIT["cuda" if like.is_cuda else "cpu"]
    return like.new_empty(min(num_rows, max(1, dense_bytes // (num_columns * like.itemsize))), num_columns)
