"""Log-ratios of two policies' probabilities, per token or per completion.

Belongs here: sums over the tokens of a sample and their gradients, in a fixed order. Does not belong here: the use of
a ratio (`losses`, `corrections`).

Legend: `_T` trained tokens, all samples joined; `_D` samples, whose `lengths_D` add up to T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

LogRatio = Callable[[Tensor, Tensor], Tensor]
"""(log-ratios of tokens `[T]`, lengths `[D]`) → log-ratios by which tokens are weighted, `[T]`."""


class _SampleSums(torch.autograd.Function):
    """`[T]` → `[D]`. Torch's own scatter and index sums add in the order in which threads arrive (decision 87)."""

    @staticmethod
    def forward(ctx: Any, values_T: Tensor, lengths_D: Tensor) -> Tensor:
        ctx.save_for_backward(lengths_D)
        # fp64: a sum over a long completion would lose the precision that clip ranges of 3e-4 need.
        return torch.segment_reduce(values_T.double(), "sum", lengths=lengths_D).to(values_T.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (lengths_D,) = ctx.saved_tensors
        return gradients[0].repeat_interleave(lengths_D), None


class _Spread(torch.autograd.Function):
    """`[D]` → `[T]`: each sample's value at each of its tokens."""

    @staticmethod
    def forward(ctx: Any, values_D: Tensor, lengths_D: Tensor) -> Tensor:
        ctx.save_for_backward(lengths_D)
        return values_D.repeat_interleave(lengths_D)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (lengths_D,) = ctx.saved_tensors
        return sample_sums(gradients[0], lengths_D), None


def sample_sums(values_T: Tensor, lengths_D: Tensor) -> Tensor:
    """Each sample's sum, `[D]`."""
    sums: Tensor = _SampleSums.apply(values_T, lengths_D)
    return sums


def spread(values_D: Tensor, lengths_D: Tensor) -> Tensor:
    """Each sample's value at each of its tokens, `[T]`."""
    spread_T: Tensor = _Spread.apply(values_D, lengths_D)
    return spread_T


def token_ratio(log_ratio_T: Tensor, lengths_D: Tensor) -> Tensor:
    """Each token on its own (PPO, GRPO)."""
    return log_ratio_T


def sequence_mean_ratio(log_ratio_T: Tensor, lengths_D: Tensor) -> Tensor:
    """log (π(y) / π_old(y))^(1/|y|), the same for every token of a completion (GSPO, arXiv:2507.18071 eq. 7)."""
    return spread(sample_sums(log_ratio_T, lengths_D) / lengths_D, lengths_D)


def sequence_ratio(log_ratio_T: Tensor, lengths_D: Tensor) -> Tensor:
    """log π(y) / π_old(y), the same for every token of a completion: one action (RLOO, arXiv:2402.14740)."""
    return spread(sample_sums(log_ratio_T, lengths_D), lengths_D)


RATIOS: Mapping[str, LogRatio] = {
    "Token": token_ratio,
    "SequenceMean": sequence_mean_ratio,
    "SequenceSum": sequence_ratio,
}
