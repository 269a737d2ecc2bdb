"""Each token by its expert's dense matrix, in one product.

Belongs here: torch's grouped product, with tokens that are nobody's. Does not belong here: where matrices come from.

Legend: `T` tokens, `E` experts, matrices `[E, K, N]`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

EXPERT_DENSE_BYTES = 1 << 30
"""Most bytes of experts that are dense at a time."""
ALIGNED_ELEMENTS = 8
"""A grouped product wants rows of 16 bytes or a multiple."""


def is_aligned(rows: int, columns: int) -> bool:
    """Whether BF16 matrices of this shape may go into a grouped product, either way."""
    return rows % ALIGNED_ELEMENTS == 0 and columns % ALIGNED_ELEMENTS == 0


def grouped_dense(x_TK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """`[T, N]`; 0 for tokens behind the last offset, which belong to nobody."""
    y_TN = F.grouped_mm(x_TK.contiguous(), w_EKN, offs=offsets_E.to(torch.int32))
    nobodys_T = torch.arange(len(y_TN), device=y_TN.device) >= offsets_E[-1]
    return y_TN.masked_fill_(nobodys_T.unsqueeze(1), 0.0)
