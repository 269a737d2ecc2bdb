"""NVFP4: E2M1 codes, one E4M3 scale per 16 columns of a row, one F32 scale per tensor. Two vendors, inverse globals.

compressed-tensors (`weight_packed`, `weight_scale`, `weight_global_scale`) divides by its global scale, 448·6/amax.
ModelOpt (`weight`, `weight_scale`, `weight_scale_2`) multiplies by its own, amax/(448·6). A reciprocal rounds, so
neither file can be read with the other's arithmetic. Oracles, bit for bit: compressed-tensors for its own files,
torchao's `NVFP4Tensor` for ModelOpt's. ModelOpt itself gives the same bits except for the code -0, which its table maps
to +0; E2M1 has a -0.

Order of operations, both: `s = float32(e4m3) / global` or `float32(e4m3) * scale_2`, rounded to fp32; then
`bf16(float32(code) * s)`: a product rounded to fp32, then to BF16. Wider dtypes widen that BF16 value.

Belongs here: the format as stored in files. Does not belong here: swizzled scales, which only kernels use; activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from orbit_runtime.errors import ModelError
from orbit_runtime.quant import e2m1
from orbit_runtime.quant.checks import (
    DAMAGED,
    check_groups,
    check_matrix,
    check_scale,
    e4m3_values,
    take,
    times_scales,
)

GROUP = 16
E4M3_MAX, E4M3_TINY = 448.0, 2.0**-9
NAMES = {
    "NVFP4": ("weight_packed", "weight_scale", "weight_global_scale"),
    "NVFP4ModelOpt": ("weight", "weight_scale", "weight_scale_2"),
}


@dataclass(frozen=True, slots=True, eq=False)
class NVFP4Weight:
    """A weight of shape `[N, K]` (out, in), exactly as the checkpoint stores it.

    qdata: uint8 `[N, K/2]`, even column in the low nibble
    scale: float8_e4m3fn `[N, K/16]`
    global_scale: float32, one element; a divisor in layout `NVFP4`, a factor in `NVFP4ModelOpt`
    """

    qdata: Tensor
    scale: Tensor
    global_scale: Tensor
    layout: str = "NVFP4"

    @property
    def shape(self) -> tuple[int, int]:
        return (self.qdata.shape[0], self.qdata.shape[1] * 2)

    @property
    def block_size(self) -> int:
        return GROUP


def tensor_names(prefix: str, layout: str = "NVFP4") -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in NAMES[layout])


def from_checkpoint(tensors: Mapping[str, Tensor], name: str, layout: str = "NVFP4") -> NVFP4Weight:
    """The weight of module `name` from its checkpoint tensors, unchanged, after checking that they are consistent."""
    names = tensor_names(name, layout)
    qdata, scale, global_scale = take(tensors, names)
    check_matrix(qdata, (torch.uint8,), None, names[0])
    rows, columns = qdata.shape[0], qdata.shape[1] * 2
    check_groups(columns, GROUP, names[0])
    check_matrix(scale, (torch.float8_e4m3fn,), (rows, columns // GROUP), names[1])
    if global_scale.dtype != torch.float32 or list(global_scale.shape) not in ([], [1]):
        raise ModelError(
            f"expected one float32 scale, found {global_scale.dtype} {list(global_scale.shape)}",
            where=names[2],
            fix=DAMAGED,
        )
    check_scale(scale, names[1])
    check_scale(global_scale, names[2])
    return NVFP4Weight(qdata, scale, global_scale, layout)


def quantize(w: Tensor, layout: str = "NVFP4", *, amax: Tensor | None = None) -> NVFP4Weight:
    """The rule of both vendors: block scale `amax16 / 6`, expressed in E4M3 relative to the tensor's largest value.

    Projections that an engine fuses (q, k, v; gate, up) must share their global scale: pass their largest `amax`.
    Blocks of zeros get scale 1, and scales are clamped to [2^-9, 448], as in ModelOpt.
    """
    rows, columns = w.shape
    assert columns % GROUP == 0, columns
    blocks = w.float().view(rows, columns // GROUP, GROUP)
    largest = blocks.abs().amax() if amax is None else amax.float()
    largest = torch.where(largest == 0, 1.0, largest.clamp(min=1e-30))
    factor = largest / (e2m1.MAX * E4M3_MAX)
    global_scale = e2m1.MAX * E4M3_MAX / largest if layout == "NVFP4" else factor
    block_amax = blocks.abs().amax(-1)
    wanted = block_amax / (e2m1.MAX * factor)
    scale = torch.where(block_amax == 0, 1.0, wanted).clamp(E4M3_TINY, E4M3_MAX).to(torch.float8_e4m3fn)
    # Divided by the rounded scale that dequantising multiplies by, not by the exact one.
    effective = scale.float() / global_scale if layout == "NVFP4" else scale.float() * global_scale
    codes = e2m1.encode((blocks / effective.unsqueeze(-1)).view(rows, columns))
    return NVFP4Weight(e2m1.pack(codes), scale, global_scale.reshape(1 if layout == "NVFP4" else ()), layout)


def views(qdata: Tensor, scale: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return qdata.view(torch.uint16), scale, global_scale.reshape(1, 1).expand(qdata.shape[0], 1)


def dense_rows(qdata: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """BF16 `[rows, K]` from the `views` of any run of rows; layout `NVFP4`."""
    return times_scales(e2m1.unpack(qdata), e4m3_values(scale).float() / global_scale)


def dense_rows_modelopt(qdata: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """The same for layout `NVFP4ModelOpt`."""
    return times_scales(e2m1.unpack(qdata), e4m3_values(scale).float() * global_scale)


def dequantize(weight: NVFP4Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    rows = dense_rows if weight.layout == "NVFP4" else dense_rows_modelopt
    return rows(*views(weight.qdata, weight.scale, weight.global_scale)).to(dtype)


def buffers(weight: NVFP4Weight) -> dict[str, Tensor]:
    """The packed tensors by checkpoint name, relative to the module, in the order that `views` takes."""
    return dict(zip(NAMES[weight.layout], (weight.qdata, weight.scale, weight.global_scale), strict=True))


def from_buffers(tensors: Mapping[str, Tensor]) -> NVFP4Weight:
    layout = next(layout for layout, names in NAMES.items() if all(name in tensors for name in names))
    return NVFP4Weight(*(tensors[name] for name in NAMES[layout]), layout)


def num_bytes(weight: NVFP4Weight) -> int:
    return weight.qdata.nbytes + weight.scale.nbytes + weight.global_scale.nbytes


def tiles(weight: NVFP4Weight) -> dict[str, tuple[int, int] | None]:
    """Rows and columns covered by one element of each packed tensor; None: the whole weight."""
    return dict(zip(NAMES[weight.layout], ((1, 2), (1, GROUP), None), strict=True))


def to_checkpoint(weight: NVFP4Weight) -> dict[str, Tensor]:
    """The tensors of this weight in a file, relative to the module."""
    return buffers(weight)
