"""Ratios of two policies' probabilities, per token or per completion, and importance weights made of them.

Belongs here: sums over the tokens of a sample and bounds of each token, with their gradients, in a fixed order; weights
without gradient that correct for differences between the sampling engine and the trainer, under the same adapter. Does
not belong here: the ratio by which an update is clipped, and its bounds (`losses`).

Gradients of bounds are written out: torch's own gradients of `clamp` and `minimum` select by masks, and on a CPU one
`where` takes as long as eight products. The numbers are torch's, bit for bit.

Legend: `_T` trained tokens, all samples joined; `_D` samples, whose `lengths_D` add up to T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from orbit_runtime.algorithms.constants import LOG_RATIO_LIMIT, Correction

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
    return token_ratio(log_ratio_T) if sequence is None else spread(sequence(log_ratio_T, lengths_D), lengths_D)


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


def importance_weights(
    old_trainer_logprobs_T: Tensor, sampled_logprobs_T: Tensor, lengths_D: Tensor, correction: Correction
) -> Tensor:
    """The weight of each token. The trainer's log-probs are those from before the step's first update.

    With r_t = π_trainer,old / π_engine of a token, and its product over a completion:
    ```
    TokenTruncated     min(r_t, cap)              FlashRL, fengyao.notion.site/flash-rl; truncation: Ionides 2008
    TokenMasked        r_t inside [floor, cap], else 0      IcePop, arXiv:2510.18855
    SequenceTruncated  min(product of r, cap), at each token of the answer      TRL 1.16, verl 0.9
    SequenceMasked     product of r inside [floor, cap], else 0      TRL 1.16
    GeometricMasked    1 where (product of r)^(1/|y|) is inside [floor, cap], else 0      richardli.xyz/rl-collapse
    ```
    `veto` sets a whole completion to 0 if any of its r_t is below it (the same article). A weight of 0 does not change
    the reduction's denominators (as in TRL 1.16): dropping tokens changes no other token's weight.
    """
    log_ratio_T = (old_trainer_logprobs_T - sampled_logprobs_T).detach()
    sequence = None
    if correction.type.startswith("Sequence"):
        sequence = sequence_ratio
    elif correction.type.startswith("Geometric"):
        sequence = sequence_mean_ratio
    weights_T = ratio_of_tokens(log_ratio_T, lengths_D, sequence)
    if correction.type.endswith("Truncated"):
        weights_T = weights_T.clamp(max=correction.cap)
    else:
        assert correction.floor is not None, "a masked type has a floor"
        inside_T = (weights_T >= correction.floor) & (weights_T <= correction.cap)
        kept_T = torch.ones_like(weights_T) if correction.type == "GeometricMasked" else weights_T
        weights_T = torch.where(inside_T, kept_T, 0.0)
    if correction.veto is not None:
        below_T = (token_ratio(log_ratio_T) < correction.veto).to(weights_T)
        weights_T = torch.where(spread(sample_sums(below_T, lengths_D), lengths_D) > 0, 0.0, weights_T)
    return weights_T
