"""Divergences between next-token distributions and their gradients: pure functions.

Belongs here: KL from the reference inside the loss, estimated per token; a student's divergence from its teacher over a
vocabulary, over the teacher's k likeliest tokens, and estimated from the sampled token. Does not belong here: KL in the
reward (`advantages`), logits (`policy.distance`), choosing the teacher (`training.passes`).

One number selects a student's divergence, as in GKD (Agarwal et al. 2023, arXiv:2306.13649, eq. 1) and TRL's
`generalized_jsd_loss`. With S the student's distribution, T the teacher's and M = (1 - beta) S + beta T:
```
beta 0       KL(T || S)   forward: covers what the teacher does
beta 1       KL(S || T)   reverse: seeks what the teacher does most (MiniLLM, arXiv:2306.08543)
in between   beta KL(T || M) + (1 - beta) KL(S || M)
```
Legend: `R` tokens, `C` cells of a distribution: the vocabulary, or k tokens and one cell for all others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from orbit_runtime.algorithms.constants import LOG_RATIO_LIMIT
from orbit_runtime.algorithms.ratios import limited, token_ratio
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


LARGEST_MASS = -1e-7
"""Upper bound for the log of the listed tokens' total mass: rounding can push their sum above 1, and the remainder
needs a logarithm too. TRL 1.16 has the same bound."""


def divergence(student_RC: Tensor, teacher_RC: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """`(values [R], slopes [R, C])` from log-probs; a slope is the derivative by the student's logit of that cell.

    With g the derivative by S, the derivative by a logit is S (g - sum S g): T and the normalisation of M cancel,
    leaving
    ```
    forward      S - T
    reverse      S (log S/T - KL(S || T))
    in between   (1 - beta) S (log S/M - KL(S || M))
    ```
    """
    student = student_RC.exp()
    if beta == 0.0:
        teacher = teacher_RC.exp()
        return (teacher * (teacher_RC - student_RC)).sum(-1), student - teacher
    if beta == 1.0:
        log_ratio = student_RC - teacher_RC
        value_R = (student * log_ratio).sum(-1)
        return value_R, student.mul_(log_ratio.sub_(value_R[:, None]))
    share = torch.tensor(beta, dtype=student_RC.dtype, device=student_RC.device)
    mixture = torch.logaddexp(student_RC + torch.log1p(-share), teacher_RC + torch.log(share))
    of_teacher_R = (teacher_RC.exp() * (teacher_RC - mixture)).sum(-1)
    log_ratio = student_RC - mixture
    of_student_R = (student * log_ratio).sum(-1)
    value_R = beta * of_teacher_R + (1.0 - beta) * of_student_R
    return value_R, student.mul_(log_ratio.sub_(of_student_R[:, None])).mul_(1.0 - beta)


def rest_of(logprobs_RK: Tensor) -> Tensor:
    """`[R, 1]`: log of the probability that remains for all other tokens, if only these log-probs are known."""
    told = torch.logsumexp(logprobs_RK, dim=-1, keepdim=True).clamp(max=LARGEST_MASS)
    return torch.log(-torch.expm1(told))


def split_off(logprobs_RV: Tensor, ids_RK: Tensor) -> Tensor:
    """`[R, K + 1]`: log-probs of these tokens, and of all others as one cell.

    The remainder is summed from its own tokens, so it is exact however small it is. Merging cells never increases a
    divergence (data processing inequality), so the value over k tokens and the remainder never exceeds the value over
    the vocabulary. No mass is lost either, unlike scaling k probabilities up to 1, which leaves the student
    unconstrained outside them.
    """
    rest = logprobs_RV.scatter(-1, ids_RK, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs_RV.gather(-1, ids_RK), rest], dim=-1)


def spread_slopes(slopes_RC: Tensor, logprobs_RV: Tensor, ids_RK: Tensor, rest_R1: Tensor) -> Tensor:
    """`[R, V]`: slopes by cell → slopes by logit. Each token of the remainder gets the remainder's slope in proportion
    to its share of that mass."""
    spread = (logprobs_RV - rest_R1).exp_().mul_(slopes_RC[:, -1:])
    return spread.scatter_(-1, ids_RK, slopes_RC[:, :-1])


def sampled_divergence(logprobs_T: Tensor, old_logprobs_T: Tensor, teacher_logprobs_T: Tensor, beta: float) -> Tensor:
    """A per-token loss whose gradient, averaged over the policy's samples, is that of the divergence.

    With d = log T - log S of the token, and ratio = new / old probability:
    ```
    reverse   -ratio * sg(d)   a token's advantage is how much likelier the teacher finds it: a policy gradient
                               (Thinking Machines, On-Policy Distillation, 2025; MiniLLM, arXiv:2306.08543 eq. 2,
                               a single step's term)
    forward   e^d - 1 - d      K3, whose gradient is that of KL(T || S) (arXiv:2506.09477)
    ```
    """
    if beta == 0.0:
        return kl_estimate(logprobs_T, teacher_logprobs_T, "K3")
    ratio_T = token_ratio(logprobs_T - old_logprobs_T)
    return ratio_T * kl_estimate(logprobs_T, teacher_logprobs_T, "K1").detach()
