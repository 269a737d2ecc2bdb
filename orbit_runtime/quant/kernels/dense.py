"""Multiplies each token by its expert's dense matrix, in one product.

Legend: `T` tokens, `E` experts, matrices `[E, K, N]`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from orbit_runtime.quant.kernels import panels

EXPERT_DENSE_BYTES = 1 << 30
"""Maximum bytes of dense experts at a time."""
ALIGNED_ELEMENTS = 8
"""A grouped product requires rows whose size is a multiple of 16 bytes."""


def is_aligned(rows: int, columns: int) -> bool:
    """Whether BF16 matrices of this shape can be used in a grouped product, in both orientations."""
    return rows % ALIGNED_ELEMENTS == 0 and columns % ALIGNED_ELEMENTS == 0


def grouped_product(x_TK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """`torch.nn.functional.grouped_mm`; where Orbit's kernel takes such factors, one group after the other, and a row
    has the same bits for any number of rows. Outside of autograd."""
    if not panels.can_multiply(x_TK, x_TK.shape[1]):
        return F.grouped_mm(x_TK, w_EKN, offs=offsets_E)
    y_TN, stops = x_TK.new_zeros(len(x_TK), w_EKN.shape[2]), offsets_E.tolist()
    for w_KN, start, stop in zip(w_EKN, [0, *stops[:-1]], stops, strict=True):
        if stop > start and w_KN.stride(1) == 1:
            y_TN[start:stop] = panels.multiply_turned(x_TK[start:stop], w_KN)
        elif stop > start:
            panels.multiply(x_TK[start:stop], w_KN.t(), out=y_TN[start:stop])
    return y_TN


def grouped_dense(x_TK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """`[T, N]`; 0 for tokens after the last offset, which have no expert."""
    y_TN = grouped_product(x_TK.contiguous(), w_EKN, offsets_E.to(torch.int32))
    nobodys_T = torch.arange(len(y_TN), device=y_TN.device) >= offsets_E[-1]
    return y_TN.masked_fill_(nobodys_T.unsqueeze(1), 0.0)
