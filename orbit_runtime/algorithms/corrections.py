"""Weights that correct for differences between the sampling engine and the trainer, under the same adapter.

Belongs here: importance weights without gradient. Does not belong here: the ratio by which an update is clipped
(`losses`).

Legend: `_T` trained tokens, `_D` samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orbit_runtime.algorithms.constants import Correction
from orbit_runtime.algorithms.ratios import (
    ratio_of_tokens,
    sample_sums,
    sequence_mean_ratio,
    sequence_ratio,
    spread,
    token_ratio,
)


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
