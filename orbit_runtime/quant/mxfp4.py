"""MXFP4: E2M1 codes, one power of two (E8M0) per 32 columns of a row. OCP Microscaling Formats 1.0.

Three layouts of the same bytes: compressed-tensors (`weight_packed`, `weight_scale`, both uint8), DeepSeek-V4 (`weight`
int8, `scale` float8_e8m0fnu), gpt-oss (`…_blocks` `[E, R, K/32, 16]` and `…_scales` `[E, R, K/32]`, uint8, all experts
in one tensor, here with its E·R rows concatenated).

Oracle: transformers' `_convert_moe_packed_tensors` (gpt-oss), bit for bit. Order of operations:
`bf16(code * 2^(s-127))`, which is exact unless it overflows, so all vendors agree except for s = 255,
which the standard defines as NaN and Orbit refuses.

Belongs here: the format. Does not belong here: gpt-oss's order of gate and up, kernels' shuffled scales.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from orbit_runtime.errors import ModelError
from orbit_runtime.quant import e2m1
from orbit_runtime.quant.checks import DAMAGED, check_groups, check_matrix, take

GROUP = 32
NAN_SCALE = 255
NAMES = {
    "MXFP4": (".weight_packed", ".weight_scale"),
    "MXFP4V4": (".weight", ".scale"),
    "MXFP4GptOss": ("_blocks", "_scales"),
}
DTYPES = {
    "MXFP4": (torch.uint8, torch.uint8),
    "MXFP4V4": (torch.int8, torch.float8_e8m0fnu),
    "MXFP4GptOss": (torch.uint8, torch.uint8),
}


@dataclass(frozen=True, slots=True, eq=False)
class MXFP4Weight:
    """A weight of shape `[N, K]` (out, in), exactly as the checkpoint stores it.

    qdata: one byte `[N, K/2]`, even column in the low nibble; gpt-oss: N = experts · rows
    scale: one byte `[N, K/32]`, s stands for 2^(s-127)
    """

    qdata: Tensor
    scale: Tensor
    layout: str = "MXFP4"
    num_experts: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        return (self.qdata.shape[0], self.qdata.shape[1] * 2)

    @property
    def block_size(self) -> int:
        return GROUP


def tensor_names(prefix: str, layout: str = "MXFP4") -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for name in NAMES[layout])


def from_checkpoint(tensors: Mapping[str, Tensor], name: str, layout: str = "MXFP4") -> MXFP4Weight:
    """The weight of module `name` from its checkpoint tensors, unchanged, after checking that they are consistent."""
    names = tensor_names(name, layout)
    qdata, scale = take(tensors, names)
    experts = 1
    if layout == "MXFP4GptOss":
        experts = qdata.shape[0]
        _check_gpt_oss(qdata, scale, names)
        qdata, scale = qdata.reshape(-1, qdata.shape[2] * 16), scale.reshape(-1, scale.shape[2])
    code_type, scale_type = DTYPES[layout]
    check_matrix(qdata, (code_type,), None, names[0])
    rows, columns = qdata.shape[0], qdata.shape[1] * 2
    check_groups(columns, GROUP, names[0])
    check_matrix(scale, (scale_type,), (rows, columns // GROUP), names[1])
    if bool((scale.view(torch.uint8) == NAN_SCALE).any()):
        raise ModelError("a scale is 255, which is NaN in E8M0", where=names[1], fix=DAMAGED)
    return MXFP4Weight(qdata, scale, layout, experts)


def quantize(w: Tensor, layout: str = "MXFP4") -> MXFP4Weight:
    """compressed-tensors' rule: the block's largest value, rounded to E2M1's precision, determines the exponent.

    `s = 2^e / 4`, with e the exponent of the rounded largest value; a largest value just under 7·s is clamped to 6·s.
    """
    assert layout != "MXFP4GptOss", "gpt-oss packs all experts at once"
    rows, columns = w.shape
    assert columns % GROUP == 0, columns
    blocks = w.float().view(rows, columns // GROUP, GROUP)
    amax = blocks.abs().amax(-1)
    # A mantissa of 1.75 or more rounds up to the next power of two.
    bits = (amax.view(torch.int32) + (1 << 21)) >> 23
    stored = torch.where(amax == 0, 127, bits - 2).clamp(0, 254).to(torch.uint8)
    codes = e2m1.encode((blocks / torch.exp2(stored.float() - 127).unsqueeze(-1)).view(rows, columns))
    code_type, scale_type = DTYPES[layout]
    return MXFP4Weight(e2m1.pack(codes).view(code_type), stored.view(scale_type), layout)


@functools.cache
def _powers(device: torch.device) -> Tensor:
    """BF16 `[256]`: 2^(s-127); 2^-127 is subnormal and exact."""
    return torch.exp2(torch.arange(256, dtype=torch.float64) - 127).bfloat16().to(device)


def views(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return qdata.view(torch.uint16), scale.view(torch.uint8)


def dense_rows(qdata: Tensor, scale: Tensor) -> Tensor:
    """BF16 `[rows, K]` from the `views` of any run of rows."""
    rows, groups = scale.shape
    factors = _powers(scale.device).index_select(0, scale.to(torch.int32).view(-1)).view(rows, groups, 1)
    return e2m1.unpack(qdata).view(rows, groups, GROUP).mul_(factors).view(rows, -1)


def dequantize(weight: MXFP4Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return dense_rows(*views(weight.qdata, weight.scale)).to(dtype)


def expert(weight: MXFP4Weight, index: int) -> MXFP4Weight:
    """One expert of a gpt-oss tensor; shares its memory."""
    rows = weight.shape[0] // weight.num_experts
    run = slice(index * rows, (index + 1) * rows)
    return MXFP4Weight(weight.qdata[run], weight.scale[run], weight.layout)


def buffers(weight: MXFP4Weight) -> dict[str, Tensor]:
    """The packed tensors by checkpoint name, relative to the module, in the order that `views` takes."""
    names = [name.lstrip("._") for name in NAMES[weight.layout]]
    return dict(zip(names, (weight.qdata, weight.scale), strict=True))


def from_buffers(tensors: Mapping[str, Tensor]) -> MXFP4Weight:
    for layout, names in NAMES.items():
        if all(name.lstrip("._") in tensors for name in names):
            return MXFP4Weight(*(tensors[name.lstrip("._")] for name in names), layout)
    raise AssertionError(f"no MXFP4 layout has {sorted(tensors)}")


def num_bytes(weight: MXFP4Weight) -> int:
    return weight.qdata.nbytes + weight.scale.nbytes


def tiles(weight: MXFP4Weight) -> dict[str, tuple[int, int] | None]:
    """Rows and columns covered by one element of each packed tensor."""
    codes, scales = buffers(weight)
    return {codes: (1, 2), scales: (1, GROUP)}


def to_checkpoint(weight: MXFP4Weight) -> dict[str, Tensor]:
    """The tensors of this weight in a file, relative to the module."""
    return buffers(weight)


def _check_gpt_oss(blocks: Tensor, scales: Tensor, names: tuple[str, ...]) -> None:
    whole = blocks.ndim == 4 and blocks.shape[-1] == GROUP // 2 and 0 not in blocks.shape
    if not whole:
        raise ModelError(
            f"expected [experts, rows, groups, 16], found {list(blocks.shape)}", where=names[0], fix=DAMAGED
        )
    if scales.shape != blocks.shape[:-1]:
        raise ModelError(f"expected {list(blocks.shape[:-1])}, found {list(scales.shape)}", where=names[1], fix=DAMAGED)
