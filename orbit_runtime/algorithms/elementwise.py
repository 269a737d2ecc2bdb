"""Bounded numbers of tokens, with gradients written out.

Belongs here: bounds and their gradients, of each token on its own. Does not belong here: which bounds (`losses`), sums
over the tokens of a sample (`ratios`).

torch's own gradients of `clamp` and `minimum` select by masks, and on a CPU one `where` takes as long as eight
products. The numbers are torch's, bit for bit. Legend: `_T` tokens, or whole samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from orbit_runtime.algorithms.constants import LOG_RATIO_LIMIT


def limited(log_ratio_T: Tensor) -> Tensor:
    """Log-ratios inside `LOG_RATIO_LIMIT`, without gradient at and beyond it."""
    return torch.nn.functional.hardtanh(log_ratio_T, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


class _Lesser(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ratio_T: Tensor, advantages_T: Tensor, least: float | None, most: float
    ) -> tuple[Tensor, Tensor]:
        whole_T = ratio_T * advantages_T
        lesser_T = ratio_T.clamp(least, most).mul_(advantages_T)
        torch.minimum(lesser_T, whole_T, out=lesser_T)
        clipped_T = torch.lt(lesser_T, whole_T, out=whole_T)
        ctx.mark_non_differentiable(clipped_T)
        ctx.save_for_backward(advantages_T, clipped_T)
        return lesser_T, clipped_T

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient_T: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        advantages_T, clipped_T = ctx.saved_tensors
        # Exactly the advantage, or exactly 0.
        slopes_T = torch.addcmul(advantages_T, advantages_T, clipped_T, value=-1)
        return slopes_T.mul_(gradient_T), None, None, None


def lesser(ratio_T: Tensor, advantages_T: Tensor, least: float | None, most: float) -> tuple[Tensor, Tensor]:
    """`min(ratio * A, clip(ratio, least, most) * A)`, and 1.0 where only the second is that; its gradient is 0.

    Where both are equal the gradient is the first's: with `least` or `most` 1, a token still learns on policy.
    """
    found: tuple[Tensor, Tensor] = _Lesser.apply(ratio_T, advantages_T, least, most)
    return found
