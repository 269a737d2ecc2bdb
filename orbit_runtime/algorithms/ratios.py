"""Ratios of two policies' probabilities, per token or per completion.

Belongs here: sums over the tokens of a sample and their gradients, in a fixed order. Does not belong here: the use of
a ratio (`losses`, `corrections`).

Legend: `_T` trained tokens, all samples joined; `_D` samples, whose `lengths_D` add up to T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orbit_runtime.algorithms.elementwise import limited

SequenceRatio = Callable[[Tensor, Tensor], Tensor]
"""(log-ratios of tokens `[T]`, lengths `[D]`) → one ratio for each completion, `[D]`; finite and positive."""


def _repeated(values_D: Tensor, lengths_D: Tensor) -> Tensor:
    if values_D.device.type == "cpu":
        # A copy of runs; torch gathers through an index of every token, which takes six times as long.
        return torch.from_numpy(np.repeat(values_D.detach().numpy(), lengths_D.numpy()))
    return values_D.repeat_interleave(lengths_D)


class _SampleSums(torch.autograd.Function):
    """`[T]` → `[D]`. Torch's own scatter and index sums add in the order in which threads arrive (decision 5)."""

    @staticmethod
    def forward(ctx: Any, values_T: Tensor, lengths_D: Tensor) -> Tensor:
        ctx.save_for_backward(lengths_D)
        # fp64: a sum over a long completion would lose the precision that clip ranges of 3e-4 need.
        return torch.segment_reduce(values_T.double(), "sum", lengths=lengths_D).to(values_T.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (lengths_D,) = ctx.saved_tensors
        return _repeated(gradients[0], lengths_D), None


class _Spread(torch.autograd.Function):
    """`[D]` → `[T]`: each sample's value at each of its tokens."""

    @staticmethod
    def forward(ctx: Any, values_D: Tensor, lengths_D: Tensor) -> Tensor:
        ctx.save_for_backward(lengths_D)
        return _repeated(values_D, lengths_D)

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


def shared_by_tokens(values_T: Tensor, lengths_D: Tensor) -> Tensor | None:
    """`[D]`: each sample's value if all of its tokens share it; else None. On a GPU None: asking would wait for it."""
    if not values_T.is_cpu or not len(values_T):
        return None
    # The last token of each: a sample without any takes a neighbour's, which is spread to none.
    last_D = values_T[(lengths_D.cumsum(0) - 1).clamp(min=0)]
    # By numpy: `torch.equal` takes three times as long.
    return last_D if np.array_equal(_repeated(last_D, lengths_D).numpy(), values_T.numpy()) else None


def token_ratio(log_ratio_T: Tensor) -> Tensor:
    """π(token) / π_old(token), `[T]` (PPO, GRPO)."""
    return torch.exp(limited(log_ratio_T))


def sequence_mean_ratio(log_ratio_T: Tensor, lengths_D: Tensor) -> Tensor:
    """(π(y) / π_old(y))^(1/|y|) of each completion, `[D]` (GSPO, arXiv:2507.18071 eq. 7)."""
    return torch.exp(limited(sample_sums(log_ratio_T, lengths_D) / lengths_D))


def sequence_ratio(log_ratio_T: Tensor, lengths_D: Tensor) -> Tensor:
    """π(y) / π_old(y) of each completion, `[D]`: one action (RLOO, arXiv:2402.14740)."""
    return torch.exp(limited(sample_sums(log_ratio_T, lengths_D)))


SEQUENCE_RATIOS: Mapping[str, SequenceRatio | None] = {
    "Token": None,
    "SequenceMean": sequence_mean_ratio,
    "SequenceSum": sequence_ratio,
}


def ratio_of_tokens(log_ratio_T: Tensor, lengths_D: Tensor, sequence: SequenceRatio | None) -> Tensor:
    """Each token's own ratio, or its completion's, `[T]`."""
    if sequence is None:
        return token_ratio(log_ratio_T)
    return spread(sequence(log_ratio_T, lengths_D), lengths_D)
