"""How far a student's next-token distribution is from its teacher's, and the gradient of that: pure functions.

Belongs here: divergences over a vocabulary, over the teacher's k likeliest tokens, and estimated from the sampled
token. Does not belong here: logits (`policy.distance`), choosing the teacher (`training.teacher`).

One number selects the divergence, as in GKD (Agarwal et al. 2023, arXiv:2306.13649, eq. 1) and TRL's
`generalized_jsd_loss`. With S the student's distribution, T the teacher's and M = (1 - beta) S + beta T:
```
beta 0       KL(T || S)   forward: covers what the teacher does
beta 1       KL(S || T)   reverse: seeks what the teacher does most (MiniLLM, arXiv:2306.08543)
in between   beta KL(T || M) + (1 - beta) KL(S || M)
```
Legend: `R` tokens, `C` cells of a distribution: the vocabulary, or k tokens and one cell for all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orbit_runtime.algorithms.divergence import kl_estimate
from orbit_runtime.algorithms.ratios import token_ratio

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
