"""KL from the reference inside the loss.

Belongs here: per-token estimators and their gradients. Does not belong here: KL in the reward (`kl_reward`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from orbit_runtime.algorithms.constants import LOG_RATIO_LIMIT
from orbit_runtime.algorithms.elementwise import limited
from orbit_runtime.algorithms.ratios import token_ratio
from orbit_runtime.spec.objectives import KLEstimator


class _K3(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logprobs_T: torch.Tensor, reference_T: torch.Tensor) -> torch.Tensor:
        d_T = (reference_T - logprobs_T).clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ctx.save_for_backward(d_T)
        return torch.exp(d_T).sub_(1).sub_(d_T)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient_T: torch.Tensor) -> tuple[torch.Tensor, None]:
        (d_T,) = ctx.saved_tensors
        slopes_T = torch.exp(d_T).mul_(gradient_T)
        torch.sub(gradient_T, slopes_T, out=slopes_T)
        return torch.ops.aten.hardtanh_backward(
            slopes_T, d_T, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT, grad_input=slopes_T
        ), None


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
    if estimator != "K3":
        d_T = limited(reference_logprobs_T - logprobs_T)
        return -d_T if estimator == "K1" else d_T.square() / 2
    k3_T: torch.Tensor = _K3.apply(logprobs_T, reference_logprobs_T.detach())
    return k3_T


def k3_sum(logprobs_T: torch.Tensor, reference_logprobs_T: torch.Tensor) -> torch.Tensor:
    """The sum of K3 over the tokens, a scalar without gradient."""
    d_T = (reference_logprobs_T.detach() - logprobs_T.detach()).clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.exp(d_T).sub_(1).sub_(d_T).sum()


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
    ratio_T = token_ratio(logprobs_T - old_logprobs_T)
    return ratio_T * kl_estimate(logprobs_T, reference_logprobs_T, estimator)
