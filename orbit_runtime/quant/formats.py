"""The one table of on-disk formats: name → codec functions. A new format is a file beside `int4.py` and a row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from orbit_runtime.quant import bf16, int4
from orbit_runtime.quant.bf16 import BF16Weight
from orbit_runtime.quant.int4 import INT4Weight

Weight = BF16Weight | INT4Weight


@dataclass(frozen=True, slots=True)
class Codec:
    """The functions of one format; each is documented where it is defined."""

    weight_type: type
    tensor_names: Callable[[str], tuple[str, ...]]
    from_checkpoint: Callable[[Mapping[str, Tensor], str], Any]
    buffers: Callable[[Any], dict[str, Tensor]]
    from_buffers: Callable[[Mapping[str, Tensor]], Any]
    views: Callable[..., tuple[Tensor, ...]]
    """`(*packed tensors)` → the same memory as `dense_rows` reads it, rows first."""
    dense_rows: Callable[..., Tensor]
    """`(*views of any run of rows, dtype)` → dense `[rows, K]`."""
    dequantize: Callable[..., Tensor]
    num_bytes: Callable[[Any], int]
    stack: Callable[[Sequence[Any]], Any] | None
    """Weights over the same columns → one weight, rows under rows; None from it, or in its place: not possible."""


FORMATS: dict[str, Codec] = {
    name: Codec(
        weight_type=weight_type,
        tensor_names=module.tensor_names,
        from_checkpoint=module.from_checkpoint,
        buffers=module.buffers,
        from_buffers=module.from_buffers,
        views=module.views,
        dense_rows=module.dense_rows,
        dequantize=module.dequantize,
        num_bytes=module.num_bytes,
        stack=getattr(module, "stack", None),
    )
    for name, module, weight_type in (("BF16", bf16, BF16Weight), ("INT4", int4, INT4Weight))
}


def format_of(weight: Weight) -> str:
    """The name in `FORMATS` of the weight's format."""
    return next(name for name, codec in FORMATS.items() if isinstance(weight, codec.weight_type))
