"""Weights that an arithmetic could get wrong: every code, scales of every magnitude and both ends, -0.0, denormals.

Belongs here: making them, and the packed layouts they come in. Does not belong here: any expectation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orbit_runtime.quant import int4
from orbit_runtime.quant.fp8 import FP8Weight
from orbit_runtime.quant.fp8_block import FP8BlockWeight
from orbit_runtime.quant.int4_asymmetric import INT4AsymmetricWeight, pack_zero_points
from orbit_runtime.quant.mxfp4 import MXFP4Weight
from orbit_runtime.quant.nvfp4 import NVFP4Weight


def bits(tensor: Tensor) -> Tensor:
    """For comparing: equal bits, so that -0.0 is not 0.0; any NaN equals any NaN."""
    tensor = torch.where(tensor.isnan(), torch.nan, tensor).contiguous()
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bytes(*shape: int, seed: int) -> Tensor:
    """Every byte occurs: they are counted through, then shuffled."""
    size = torch.Size(shape).numel()
    counted = torch.arange(size) % 256
    return counted[torch.randperm(size, generator=generator(seed))].to(torch.uint8).view(shape)


def positive_floats(*shape: int, seed: int) -> Tensor:
    """fp32 of any exponent, denormals and the largest number included; full mantissas."""
    drawn = torch.randint(1, 0x7F800000, shape, generator=generator(seed), dtype=torch.int64).to(torch.int32)
    drawn.view(-1)[0], drawn.view(-1)[-1] = 1, 0x7F7FFFFF
    return drawn.view(torch.float32)


def ordinary_floats(*shape: int, seed: int) -> Tensor:
    """fp32 around the scales that checkpoints have, full mantissas."""
    return torch.exp(torch.randn(shape, generator=generator(seed)) * 2 - 6)


def _e4m3(*shape: int, seed: int) -> Tensor:
    """Every code but NaN."""
    drawn = random_bytes(*shape, seed=seed)
    return torch.where(drawn & 0x7F == 0x7F, drawn - 1, drawn).view(torch.float8_e4m3fn)


def fp8_block(rows: int, columns: int, scale: Tensor, layout: str = "FP8Block") -> FP8BlockWeight:
    return FP8BlockWeight(_e4m3(rows, columns, seed=1), scale, layout)


def fp8(rows: int, columns: int, scale: Tensor) -> FP8Weight:
    return FP8Weight(_e4m3(rows, columns, seed=2), scale)


def nvfp4(rows: int, columns: int, global_scale: float, layout: str = "NVFP4") -> NVFP4Weight:
    """Every positive E4M3 as a scale; 0x7f is NaN and left out."""
    count = rows * columns // 16
    scale = (torch.arange(count) % 0x7E + 1)[torch.randperm(count, generator=generator(3))].to(torch.uint8)
    return NVFP4Weight(
        random_bytes(rows, columns // 2, seed=4),
        scale.view(rows, -1).view(torch.float8_e4m3fn),
        torch.tensor([global_scale]) if layout == "NVFP4" else torch.tensor(global_scale),
        layout,
    )


def mxfp4(rows: int, columns: int, layout: str = "MXFP4") -> MXFP4Weight:
    """Every scale but NaN."""
    scale = (random_bytes(rows, columns // 32, seed=5).int() % 255).to(torch.uint8)
    qdata = random_bytes(rows, columns // 2, seed=6)
    if layout == "MXFP4V4":
        return MXFP4Weight(qdata.view(torch.int8), scale.view(torch.float8_e8m0fnu), layout)
    return MXFP4Weight(qdata, scale, layout)


def int4_asymmetric(rows: int, columns: int, group: int, dtype: torch.dtype) -> INT4AsymmetricWeight:
    codes = (random_bytes(rows, columns, seed=7).int() % 16 - 8).to(torch.int8)
    zero = (random_bytes(rows, columns // group, seed=8).int() % 16 - 8).to(torch.int8)
    scale = positive_floats(rows, columns // group, seed=9)
    # F16 has no more exponents; the others keep their denormals and their largest numbers.
    scale = scale.clamp(1e-7, 6e4).half() if dtype is torch.float16 else scale.clamp(2.0**-133, 3e38).to(dtype)
    scale = scale * (1 - 2 * (torch.arange(scale.numel()).view_as(scale) % 3 == 0).to(dtype))
    return INT4AsymmetricWeight(int4.pack(codes), scale, pack_zero_points(zero))
