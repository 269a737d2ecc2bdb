"""The distribution from which tokens are drawn, computed from logits: the one definition for engines and trainer.

The order is that of transformers' processors (`GenerationMixin._get_logits_processor`, 5.x): logit bias, repetition
penalty, temperature, top-k, top-p of the top-k tokens, min-p. Log-probs are renormalised over the remaining tokens.

Legend: `R` rows, `V` vocabulary.
"""

from __future__ import annotations

import torch


def add_bias(logits_RV: torch.Tensor, token_ids: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
    """A copy with `biases [n]` added to the columns `token_ids [n]`, which are distinct."""
    biased = logits_RV.clone()
    biased[:, token_ids] += biases
    return biased


def penalise(logits_RV: torch.Tensor, seen_RV: torch.Tensor, penalty: torch.Tensor | float) -> torch.Tensor:
    """Logits of seen tokens are divided by `penalty` if positive, otherwise multiplied (arXiv:1909.05858, in the
    variant of transformers: the paper divides both)."""
    penalised = torch.where(logits_RV < 0, logits_RV * penalty, logits_RV / penalty)
    return torch.where(seen_RV, penalised, logits_RV)


def penalty_slope(logits_RV: torch.Tensor, seen_RV: torch.Tensor, penalty: float) -> torch.Tensor:
    """The derivative of `penalise` by each logit."""
    slope = torch.where(logits_RV < 0, penalty, 1.0 / penalty)
    return torch.where(seen_RV, slope, 1.0)


def top_k_mask(logits_RV: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """True for the `top_k` most likely tokens, and for any token as likely as the last of them.

    Args:
        top_k: one value for all rows, at least 1; or `[R, 1]`, where 0 keeps the whole row.
    """
    vocabulary = logits_RV.shape[-1]
    if isinstance(top_k, int):
        return logits_RV >= logits_RV.topk(min(top_k, vocabulary)).values[:, -1:]
    ordered = logits_RV.topk(min(int(top_k.max()), vocabulary)).values
    last = ordered.gather(-1, (top_k.clamp(max=ordered.shape[-1]) - 1).clamp_(min=0))
    return (logits_RV >= last) | (top_k == 0)


def nucleus_mask(logits_RV: torch.Tensor, top_p: torch.Tensor | float, keep_R: torch.Tensor | None) -> torch.Tensor:
    """True for the smallest set of most likely tokens whose mass reaches `top_p`, and for `keep` (arXiv:1904.09751).

    `keep` is the sampled token: because of the sampler's rounding it can fall just outside the nucleus computed here.
    """
    probs, order = torch.softmax(logits_RV, dim=-1).sort(dim=-1, descending=True)
    before = probs.cumsum(-1) - probs
    mask = torch.zeros_like(logits_RV, dtype=torch.bool).scatter_(-1, order, before < top_p)
    mask[torch.arange(len(mask), device=mask.device), order[:, 0]] = True
    return _keep(mask, keep_R)


def min_p_mask(logits_RV: torch.Tensor, min_p: torch.Tensor | float) -> torch.Tensor:
    """True for tokens at least `min_p` times as likely as the most likely one (arXiv:2407.01082)."""
    probs = torch.softmax(logits_RV, dim=-1)
    return probs >= min_p * probs.amax(-1, keepdim=True)


def truncate(
    logits_RV: torch.Tensor,
    top_k: torch.Tensor | int | None,
    top_p: torch.Tensor | float | None,
    min_p: torch.Tensor | float | None,
    keep_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits after the temperature, with -inf for removed tokens; `keep` stays. `None` disables a cut for all rows."""
    logits = logits_RV
    if top_k is not None:
        logits = logits.masked_fill(~_keep(top_k_mask(logits, top_k), keep_R), float("-inf"))
    if top_p is not None:
        logits = logits.masked_fill(~nucleus_mask(logits, top_p, keep_R), float("-inf"))
    if min_p is not None:
        logits = logits.masked_fill(~_keep(min_p_mask(logits, min_p), keep_R), float("-inf"))
    return logits


def _keep(mask_RV: torch.Tensor, keep_R: torch.Tensor | None) -> torch.Tensor:
    if keep_R is not None:
        mask_RV[torch.arange(len(mask_RV), device=mask_RV.device), keep_R] = True
    return mask_RV
