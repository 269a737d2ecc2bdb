"""The one table of on-disk layouts: name → codec functions. A new format is a file beside `int4.py` and a row here.

Belongs here: the table, and cutting a rectangle of a packed weight at group boundaries, for tensor and expert
parallelism: no value is computed. Does not belong here: which module of a checkpoint has which layout (`model_info`),
which process holds which rectangle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.quant import awq, bf16, fp8, fp8_block, gptq, int4, int4_asymmetric, mxfp4, nvfp4
from orbit_runtime.quant.bf16 import BF16Weight
from orbit_runtime.quant.fp8 import FP8Weight
from orbit_runtime.quant.fp8_block import FP8BlockWeight
from orbit_runtime.quant.int4 import INT4Weight
from orbit_runtime.quant.int4_asymmetric import INT4AsymmetricWeight
from orbit_runtime.quant.mxfp4 import MXFP4Weight
from orbit_runtime.quant.nvfp4 import NVFP4Weight

Weight = BF16Weight | INT4Weight | INT4AsymmetricWeight | FP8Weight | FP8BlockWeight | NVFP4Weight | MXFP4Weight


@dataclass(frozen=True, slots=True)
class Codec:
    """The functions of one layout; each is documented where it is defined."""

    precision: str
    """The manifest's name for it: `BF16`, `INT4`, `FP8`, `NVFP4` or `MXFP4`."""
    weight_type: type
    tensor_names: Callable[[str], tuple[str, ...]]
    from_checkpoint: Callable[[Mapping[str, Tensor], str], Any]
    buffers: Callable[[Any], dict[str, Tensor]]
    from_buffers: Callable[[Mapping[str, Tensor]], Any]
    views: Callable[..., tuple[Tensor, ...]]
    """`(*packed tensors)` → views of the same memory in the form that `dense_rows` reads, rows first."""
    dense_rows: Callable[..., Tensor]
    """`(*views of any run of rows)` → BF16 `[rows, K]`."""
    dequantize: Callable[..., Tensor]
    num_bytes: Callable[[Any], int]
    tiles: Callable[[Any], dict[str, tuple[int, int] | None]]
    """Rows and columns covered by one element of each packed tensor; 0 columns: all of them; None: the whole weight.

    Used for cutting.
    """
    quantize: Callable[..., Any] | None
    """`(w, …)` → a weight; None if Orbit only reads the layout. Takes a group size if the format leaves it open."""
    to_checkpoint: Callable[[Any], dict[str, Tensor]] | None
    """A weight's tensors in a file, relative to its module; None if Orbit only reads the layout."""
    stack: Callable[[Sequence[Any]], Any] | None
    """Weights over the same columns → one weight with concatenated rows; returns None, or is None, if not possible."""


def _codec(precision: str, module: Any, weight_type: type) -> Codec:
    return Codec(
        precision=precision,
        weight_type=weight_type,
        tensor_names=module.tensor_names,
        from_checkpoint=module.from_checkpoint,
        buffers=module.buffers,
        from_buffers=module.from_buffers,
        views=module.views,
        dense_rows=module.dense_rows,
        dequantize=module.dequantize,
        num_bytes=module.num_bytes,
        tiles=getattr(module, "tiles", None) or _TILES[module],
        quantize=module.quantize,
        to_checkpoint=getattr(module, "to_checkpoint", None) or _TO_CHECKPOINT[module],
        stack=getattr(module, "stack", None),
    )


def _named(codec: Codec, module: ModuleType, layout: str, **changes: Any) -> Codec:
    """The same format under another vendor's tensor names."""
    return replace(
        codec,
        tensor_names=partial(module.tensor_names, layout=layout),
        from_checkpoint=partial(module.from_checkpoint, layout=layout),
        **({"quantize": partial(module.quantize, layout=layout)} | changes),
    )


_TILES: dict[Any, Callable[[Any], dict[str, tuple[int, int] | None]]] = {
    bf16: lambda weight: {"weight": (1, 1)},
    int4: lambda weight: {"weight_packed": (1, int4.CODES_PER_WORD), "weight_scale": (1, weight.block_size)},
}
_TO_CHECKPOINT: dict[Any, Callable[[Any], dict[str, Tensor]]] = {
    bf16: bf16.buffers,
    int4: lambda weight: int4.buffers(weight) | {"weight_shape": torch.tensor(weight.shape)},
}
_ASYMMETRIC = _codec("INT4", int4_asymmetric, INT4AsymmetricWeight)
_READ_ONLY = replace(_ASYMMETRIC, quantize=None, to_checkpoint=None)
_FP8_BLOCK = _codec("FP8", fp8_block, FP8BlockWeight)
_NVFP4 = _codec("NVFP4", nvfp4, NVFP4Weight)
_MXFP4 = _codec("MXFP4", mxfp4, MXFP4Weight)
_GPTQ = replace(_READ_ONLY, tensor_names=gptq.tensor_names)

FORMATS: dict[str, Codec] = {
    "BF16": _codec("BF16", bf16, BF16Weight),
    "INT4": _codec("INT4", int4, INT4Weight),
    "INT4Asymmetric": _ASYMMETRIC,
    "GPTQ": replace(_GPTQ, from_checkpoint=gptq.from_checkpoint),
    "GPTQv2": replace(_GPTQ, from_checkpoint=gptq.from_checkpoint_v2),
    "AWQ": replace(_READ_ONLY, tensor_names=awq.tensor_names, from_checkpoint=awq.from_checkpoint),
    "FP8": _codec("FP8", fp8, FP8Weight),
    "FP8Block": _FP8_BLOCK,
    "FP8BlockCT": _named(_FP8_BLOCK, fp8_block, "FP8BlockCT"),
    "FP8BlockV4": _named(_FP8_BLOCK, fp8_block, "FP8BlockV4"),
    "NVFP4": _NVFP4,
    "NVFP4ModelOpt": _named(_NVFP4, nvfp4, "NVFP4ModelOpt", dense_rows=nvfp4.dense_rows_modelopt),
    "MXFP4": _MXFP4,
    "MXFP4V4": _named(_MXFP4, mxfp4, "MXFP4V4"),
    "MXFP4GptOss": _named(_MXFP4, mxfp4, "MXFP4GptOss", quantize=None, to_checkpoint=None),
}
"""Layout → codec. Weights read from GPTQ and AWQ files become `INT4Asymmetric`."""


def format_of(weight: Weight) -> str:
    """The name in `FORMATS` of the weight's layout."""
    named = getattr(weight, "layout", None)
    if named is not None:
        return str(named)
    return next(name for name, codec in FORMATS.items() if isinstance(weight, codec.weight_type))


def cut_multiples(weight: Weight) -> tuple[int, int]:
    """The numbers of rows and columns of which every cut must be a multiple."""
    covered = [tile for tile in FORMATS[format_of(weight)].tiles(weight).values() if tile is not None]
    return lcm(*(rows for rows, _ in covered)), lcm(*(columns for _, columns in covered if columns))


def slice_weight(weight: Weight, rows: slice, columns: slice = slice(None), *, owned: bool = False) -> Weight:
    """The rectangle as a weight of the same layout. Rows share memory; columns are copied if they are not all selected.

    Args:
        owned: copies everything, so that the rest can be freed.

    Raises `UnsupportedError` for a cut inside a group; the last group may be partial if the weight ends in it.
    """
    codec = FORMATS[format_of(weight)]
    starts_stops = []
    for axis, wanted, size, multiple in zip(
        ("rows", "columns"), (rows, columns), weight.shape, cut_multiples(weight), strict=True
    ):
        start, stop, step = wanted.indices(size)
        assert step == 1
        for cut in (start, stop):
            if cut % multiple and cut != size:
                raise UnsupportedError(
                    f"{axis} {start} to {stop} of {size} cut through a group of {multiple}",
                    fix=f"choose a parallel size that divides the {axis} at multiples of {multiple}",
                )
        starts_stops.append((start, stop))
    (first_row, last_row), (first_column, last_column) = starts_stops
    parts = {}
    tiles = codec.tiles(weight)
    for name, tensor in codec.buffers(weight).items():
        tile = tiles[name]
        part = tensor
        if tile is not None:
            tall, wide = tile
            part = tensor[first_row // tall : -(-last_row // tall)]
            if part.ndim > 1 and wide:
                part = part[:, first_column // wide : -(-last_column // wide)]
        parts[name] = part.clone(memory_format=torch.contiguous_format) if owned else part.contiguous()
    sliced: Weight = codec.from_buffers(parts)
    return sliced
