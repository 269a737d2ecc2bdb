"""E2M1, the 4-bit float of NVFP4 and MXFP4: its sixteen values, two codes per byte, even column in the low nibble."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

MAX = 6.0
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""OCP Microscaling Formats 1.0, table 5: bit 3 is the sign."""
BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints of neighbouring magnitudes."""
TIES_UP = (False, True, False, True, False, True, False)
"""A value on a midpoint rounds to the even code, as in compressed-tensors and ModelOpt."""


@functools.cache
def _four_values(values: tuple[float, ...], device: torch.device) -> Tensor:
    """int64 `[65536]` (512 KiB): entry i holds the BF16 values of the four codes in the 16 bits i, in order."""
    words = torch.arange(1 << 16, dtype=torch.int32).unsqueeze(-1) >> torch.arange(0, 16, 4, dtype=torch.int32)
    return torch.tensor(values).bfloat16()[words & 15].view(torch.int64).view(-1).to(device)


def unpack(words: Tensor, values: tuple[float, ...] = VALUES) -> Tensor:
    """uint16 `[rows, K/4]` → BF16 `[rows, K]`, of the sixteen `values` those of the codes; every value is exact."""
    # `index_select` would be one thread's work.
    return _four_values(values, words.device).take(words.to(torch.int64)).view(torch.bfloat16)


def encode(values: Tensor) -> Tensor:
    """Values → uint8 codes, nearest, ties to even, saturating at ±6. A zero keeps its sign."""
    magnitude = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for bound, up in zip(BOUNDS, TIES_UP, strict=True):
        codes += (magnitude >= bound) if up else (magnitude > bound)
    return codes | (torch.signbit(values).to(torch.uint8) << 3)


def pack(codes: Tensor) -> Tensor:
    """uint8 codes `[N, K]` → bytes `[N, K/2]`."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)
