"""KL from the reference inside the loss.

Belongs here: per-token estimators and their gradients. Does not belong here: KL in the reward (`kl_reward`).
"""

from __future__ import annotations

import torch

from orbit_runtime.spec.objectives import KLEstimator

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this: e^20 is far outside every clip range, and an infinite ratio times a zero advantage
is NaN."""


def kl_estimate(logprobs_T: torch.Tensor, reference_logprobs_T: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) at tokens sampled by the policy (Schulman 2020,
    joschu.net/blog/kl-approx.html).

    With d = log(reference) - log(policy):
    ```
    K1  -d            unbiased, high variance, may be negative
    K2  d^2 / 2       biased, low variance, never negative
    K3  e^d - 1 - d   unbiased, low variance, never negative
    ```
    These properties concern the value. In a *loss* only the gradient matters, and it differs (arXiv:2506.09477):
    E[grad K1] = 0, so K1 in the loss regularises nothing in expectation (use it in the reward, or weighted); E[grad K2]
    = grad KL(policy || reference), the reverse KL; E[grad K3] = grad KL(reference || policy), the forward KL. All three
    hold on policy only. `weighted_kl` has the reverse KL's gradient under K1 and K3.
    """
    d_T = (reference_logprobs_T - logprobs_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "K1":
        return -d_T
    if estimator == "K2":
        return d_T.square() / 2
    return torch.exp(d_T) - 1 - d_T


def weighted_kl(
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    reference_logprobs_T: torch.Tensor,
    estimator: KLEstimator,
) -> torch.Tensor:
    """The estimate times policy / old, with gradient through both factors (DeepSeek-V3.2, arXiv:2512.02556, "Unbiased
    KL Estimate"; TRL 1.16 `use_bias_correction_kl`).

    The expectation of ratio * K under the old policy is that of K under the policy, which for K1 and K3 *is*
    KL(policy || reference) for any policy. Its gradient is therefore the reverse KL's, on policy and off.
    """
    ratio_T = torch.exp((logprobs_T - old_logprobs_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return ratio_T * kl_estimate(logprobs_T, reference_logprobs_T, estimator)
