"""Policy losses over flat tensors of response tokens.

Belongs here: loss, KL estimators and importance weights, as pure functions of log-probs. Does not belong here:
computing log-probs, reductions (`reduction` gives the weights), backward passes. `_T` the trained tokens of a
micro-batch, all samples joined, prompts and masked tokens left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

KLEstimator = Literal["K1", "K2", "K3"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped here: e^20 is far outside every clip range, and an infinite ratio times a zero advantage is
NaN."""


@dataclass(frozen=True, slots=True)
class PolicyLossSettings:
    """The constants of the clipped policy loss."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0
    """Weight of the KL term inside the loss; 0.0 where KL is off or placed in the reward."""
    kl_estimator: KLEstimator = "K3"


def kl_estimate(logprobs_T: torch.Tensor, reference_logprobs_T: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) at tokens the policy sampled (Schulman 2020,
    joschu.net/blog/kl-approx.html).

    With d = log(reference) - log(policy):
    ```
    K1  -d            unbiased, high variance, may be negative
    K2  d^2 / 2       biased, low variance, never negative
    K3  e^d - 1 - d   unbiased, low variance, never negative
    ```
    That is about the value. As a *loss* only the gradient counts, and it differs (arXiv:2506.09477): E[grad K1] = 0,
    so K1 in the loss regularises nothing in expectation (use it in the reward); E[grad K2] = grad KL(policy ||
    reference), the reverse KL; E[grad K3] = grad KL(reference || policy), the forward KL. All three hold on policy
    only.
    """
    d_T = (reference_logprobs_T - logprobs_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "K1":
        return -d_T
    if estimator == "K2":
        return d_T.square() / 2
    return torch.exp(d_T) - 1 - d_T


def truncated_importance(
    old_trainer_logprobs_T: torch.Tensor, sampled_logprobs_T: torch.Tensor, cap: float
) -> torch.Tensor:
    """min(pi_trainer,old / pi_sampler, cap) per token, without gradient: truncated importance sampling.

    Corrects for a rollout engine whose log-probs differ from the trainer's for the same weights (Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training", and FlashRL, fengyao.notion.site/flash-rl). The
    truncation is from Ionides 2008. The trainer's old log-probs are those before the step's first update.
    """
    log_ratio_T = (old_trainer_logprobs_T - sampled_logprobs_T).detach()
    return torch.exp(log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).clamp(max=cap)


def policy_loss(
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    weights_T: torch.Tensor,
    settings: PolicyLossSettings,
    *,
    reference_logprobs_T: torch.Tensor | None = None,
    importance_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped surrogate with an optional KL term (PPO, arXiv:1707.06347 eq. 7; GRPO, arXiv:2402.03300 eq. 3).

    ```
    ratio = exp(logprobs - old)
    l_t   = -importance * min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) + kl_coefficient * KL_t
    loss  = sum_t weights_t * l_t
    ```
    `importance_T` multiplies the surrogate only, not the KL term, as in TRL 1.16. Gradient flows through `logprobs_T`
    alone.

    Returns:
        The scalar loss, and detached SUMS over this micro-batch, so that micro-batches add up: `loss` (weighted, as
        above), `tokens`, and, each to be divided by `tokens`: `kl` (K3 estimate to the reference, whatever estimator is
        in the loss; absent without a reference), `kl_old` (K3 to the policy that sampled), `clip_fraction` (tokens
        whose gradient the clip removes).
    """
    assert settings.kl_coefficient == 0.0 or reference_logprobs_T is not None, "a KL term needs reference log-probs"
    old_T = old_logprobs_T.detach()
    ratio_T = torch.exp((logprobs_T - old_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    clipped_T = ratio_T.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss_T = -torch.min(ratio_T * advantages_T, clipped_T * advantages_T)
    if importance_T is not None:
        loss_T = loss_T * importance_T.detach()
    if settings.kl_coefficient != 0.0 and reference_logprobs_T is not None:
        kl_T = kl_estimate(logprobs_T, reference_logprobs_T.detach(), settings.kl_estimator)
        loss_T = loss_T + settings.kl_coefficient * kl_T
    loss = (weights_T * loss_T).sum()

    with torch.no_grad():
        is_clipped_T = ((ratio_T < 1 - settings.clip_low) & (advantages_T < 0)) | (
            (ratio_T > 1 + settings.clip_high) & (advantages_T > 0)
        )
        metrics = {
            "loss": loss.detach(),
            "tokens": torch.tensor(float(logprobs_T.numel()), device=logprobs_T.device),
            "kl_old": kl_estimate(logprobs_T, old_T, "K3").sum(),
            "clip_fraction": is_clipped_T.sum().float(),
        }
        if reference_logprobs_T is not None:
            metrics["kl"] = kl_estimate(logprobs_T, reference_logprobs_T, "K3").sum()
    return loss, metrics
