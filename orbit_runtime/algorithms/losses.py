"""Losses over flat tensors of completion tokens.

Belongs here: surrogates, each a per-token loss, and the terms that complete any of them; the critic's loss; reductions
as weights. All are pure functions: loss = sum over tokens of weight * token loss, so a mini-batch gives the same
gradient however it is split into micro-batches. Does not belong here: computing log-probs, values and advantages,
backward passes.

Legend: `_T` the trained tokens of a micro-batch, all samples joined, without prompts and masked tokens; `_D` its
samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orbit_runtime.algorithms.constants import PolicyLossSettings
from orbit_runtime.algorithms.distillation import k3_sum, kl_estimate, sampled_divergence, weighted_kl
from orbit_runtime.algorithms.ratios import SequenceRatio, lesser, ratio_of_tokens, shared_by_tokens, spread
from orbit_runtime.spec.objectives import Reduction


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The inputs of a loss: a micro-batch of whole samples. Gradient flows through `logprobs_T`, and through
    `distances_T` and `entropies_T` if present."""

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    advantages_T: Tensor
    lengths_D: Tensor
    """Trained tokens of each sample, int64, at least 1; the samples are concatenated."""
    reference_logprobs_T: Tensor | None = None
    importance_T: Tensor | None = None
    """Weights from `ratios.importance_weights`, without gradient."""
    teacher_logprobs_T: Tensor | None = None
    """The teacher's log-probs of the sampled tokens."""
    distances_T: Tensor | None = None
    """Distances from the teacher's distribution (`policy.distance`); None if only sampled tokens are compared."""
    entropies_T: Tensor | None = None
    """Entropy in nats of the distribution that each token was drawn from. No shipped loss reads it."""


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """A surrogate's loss per token, to be minimised."""

    loss_T: Tensor
    clipped_T: Tensor | None = None
    """True, or 1, if the clip removed the token's gradient, or cut its weight; or, of each sample, how many such tokens
    it has."""


Surrogate = Callable[[LossInputs, PolicyLossSettings], TokenLosses]
"""Log-probs and advantages → a loss per token, before corrections, KL and reduction."""


def clipped(
    inputs: LossInputs, settings: PolicyLossSettings, *, sequence_ratio: SequenceRatio | None = None
) -> TokenLosses:
    """The clipped surrogate (PPO, arXiv:1707.06347 eq. 7), per token or per completion (`ratios`).

    ```
    l_t = -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)
    ```
    """
    log_ratio_T, lengths_D = inputs.logprobs_T - inputs.old_logprobs_T.detach(), inputs.lengths_D
    least, most = (None if settings.clip_low is None else 1 - settings.clip_low), 1 + settings.clip_high
    advantages_D = None if sequence_ratio is None else shared_by_tokens(inputs.advantages_T, lengths_D)
    if sequence_ratio is not None and advantages_D is not None:
        # The same for all tokens of a completion: computed once for each.
        gain_D, is_clipped_D = lesser(sequence_ratio(log_ratio_T, lengths_D), advantages_D, least, most)
        return TokenLosses(spread(-gain_D, lengths_D), is_clipped_D * lengths_D)
    ratio_T = ratio_of_tokens(log_ratio_T, lengths_D, sequence_ratio)
    gain_T, is_clipped_T = lesser(ratio_T, inputs.advantages_T, least, most)
    return TokenLosses(-gain_T, is_clipped_T)


def clipped_weights(
    inputs: LossInputs, settings: PolicyLossSettings, *, sequence_ratio: SequenceRatio | None = None
) -> TokenLosses:
    """REINFORCE with clipped importance weights (CISPO, arXiv:2506.13585 eq. 4 and 5): no token loses its gradient.

    ```
    l_t = -sg(clip(ratio, 1 - low, 1 + high)) * A * logprob
    ```
    """
    ratio_T = ratio_of_tokens((inputs.logprobs_T - inputs.old_logprobs_T).detach(), inputs.lengths_D, sequence_ratio)
    least = None if settings.clip_low is None else 1 - settings.clip_low
    weight_T = ratio_T.clamp(least, 1 + settings.clip_high)
    return TokenLosses(-weight_T * inputs.advantages_T * inputs.logprobs_T, weight_T != ratio_T)


def nothing(inputs: LossInputs, settings: PolicyLossSettings) -> TokenLosses:
    """No loss: for an algorithm that learns from its teacher alone."""
    return TokenLosses(0.0 * inputs.logprobs_T)


def likelihood(inputs: LossInputs, settings: PolicyLossSettings) -> TokenLosses:
    """Cross-entropy of demonstrated completions: `l_t = -logprob`."""
    return TokenLosses(-inputs.logprobs_T)


def policy_loss(
    inputs: LossInputs, weights_T: Tensor, settings: PolicyLossSettings, *, surrogate: Surrogate = clipped
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch: a surrogate with correction, KL term, teacher term and reduction.

    ```
    loss = sum_t weights_t * (importance_t * surrogate_t + kl_coefficient * KL_t + teacher_coefficient * D_t)
    ```
    The correction multiplies the surrogate only, not the KL term, as in TRL 1.16.

    Returns:
        The scalar loss, and detached SUMS over this micro-batch, so that micro-batches can be added: `loss` (weighted,
        as above), `tokens`, and these, to be divided by `tokens`: `kl` (K3 estimate to the reference, whichever
        estimator the loss uses; absent without a reference), `kl_old` (K3 to the policy that sampled), `clip_fraction`
        (see `TokenLosses`), `dropped_fraction` (tokens whose correction is 0; absent without a correction),
        `teacher_divergence` (the loss's, or K3 to the teacher over sampled tokens; absent without a teacher).
    """
    logprobs_T, old_T, reference_T = inputs.logprobs_T, inputs.old_logprobs_T.detach(), inputs.reference_logprobs_T
    assert settings.kl_coefficient == 0.0 or reference_T is not None, "a KL term needs reference log-probs"
    losses = surrogate(inputs, settings)
    loss_T, k3_T = losses.loss_T, None
    if inputs.importance_T is not None:
        loss_T = loss_T * inputs.importance_T.detach()
    if settings.kl_coefficient != 0.0 and reference_T is not None:
        if settings.kl_weighted:
            kl_T = weighted_kl(logprobs_T, old_T, reference_T.detach(), settings.kl_estimator)
        else:
            kl_T = kl_estimate(logprobs_T, reference_T.detach(), settings.kl_estimator)
            k3_T = kl_T.detach() if settings.kl_estimator == "K3" else None
        loss_T = loss_T + settings.kl_coefficient * kl_T
    if settings.teacher_coefficient != 0.0:
        loss_T = loss_T + settings.teacher_coefficient * _taught(inputs, settings.teacher_beta)
    loss = (weights_T * loss_T).sum()

    with torch.no_grad():
        metrics = {
            "loss": loss.detach(),
            "tokens": torch.full((), float(logprobs_T.numel()), device=logprobs_T.device),
            "kl_old": k3_sum(logprobs_T, old_T),
        }
        if losses.clipped_T is not None:
            metrics["clip_fraction"] = losses.clipped_T.to(loss.device).sum().float()
        if inputs.importance_T is not None:
            metrics["dropped_fraction"] = (inputs.importance_T == 0).sum().float()
        if reference_T is not None:
            metrics["kl"] = k3_sum(logprobs_T, reference_T) if k3_T is None else k3_T.sum()
        if inputs.distances_T is not None:
            metrics["teacher_divergence"] = inputs.distances_T.sum()
        elif inputs.teacher_logprobs_T is not None:
            metrics["teacher_divergence"] = k3_sum(logprobs_T, inputs.teacher_logprobs_T)
    return loss, metrics


def _taught(inputs: LossInputs, beta: float) -> Tensor:
    if inputs.distances_T is not None:
        return inputs.distances_T
    assert inputs.teacher_logprobs_T is not None, "a teacher says how likely it finds each token"
    return sampled_divergence(
        inputs.logprobs_T, inputs.old_logprobs_T.detach(), inputs.teacher_logprobs_T.detach(), beta
    )


def token_weights(lengths_D: Sequence[int], reduction: Reduction, constant_length: int | None = None) -> list[float]:
    """Weight of each trained token, per sample of one mini-batch; `lengths_D` counts each sample's trained tokens.

    ```
    Token     1 / sum(L)             every token counts the same      DAPO, arXiv:2503.14476 eq. 8   TRL "bnpo", "dapo"
    Sequence  1 / (D * L_i)          every sample counts the same     GRPO, arXiv:2402.03300 eq. 3   TRL "grpo"
    Constant  1 / (D * L_constant)   no length enters                 Dr. GRPO, arXiv:2503.20783     TRL "dr_grpo"
    ```

    D is the number of samples given. Rollouts whose reward timed out or crashed never become samples (`data.samples`),
    so they count neither in D nor in sum(L): a failing reward makes the batch smaller, not the learning rate of the
    other samples. A sample without trained tokens counts in D (as in TRL), and its weight applies to no token.
    """
    if reduction == "Token":
        return [1.0 / max(1, sum(lengths_D))] * len(lengths_D)
    if reduction == "Sequence":
        return [1.0 / (len(lengths_D) * max(1, length)) for length in lengths_D]
    assert constant_length is not None, "the Constant reduction needs its constant length"
    assert constant_length > 0, "the Constant reduction needs a positive length"
    return [1.0 / (len(lengths_D) * constant_length)] * len(lengths_D)


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, weights_T: Tensor, *, clip: float) -> Tensor:
    """The clipped value loss of PPO (openai/baselines ppo2; TRL 1.16 `PPOTrainer`, verl 0.9 `compute_value_loss`).

    ```
    sum_t weights_t * 1/2 max((V_t - R_t)^2, (clip(V_t, V_old,t - clip, V_old,t + clip) - R_t)^2)
    ```
    """
    old_T = old_values_T.detach()
    clipped_T = values_T.clamp(old_T - clip, old_T + clip)
    squares_T = (values_T - returns_T).square().maximum((clipped_T - returns_T).square())
    return (weights_T * squares_T).sum() / 2
