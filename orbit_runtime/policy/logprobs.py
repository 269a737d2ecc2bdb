"""Log-probs of given tokens and entropies, a chunk of rows at a time.

Belongs here: the last projection and the log-softmax, so that no `[tokens, vocabulary]` fp32 tensor outlives its chunk.
Does not belong here: hidden states (`model`), ratios and losses (`algorithms`).

Legend: `R` targets, `N` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CHUNK_ELEMENTS = 1 << 24
"""Rows per chunk are chosen so that one fp32 `[rows, V]` tensor has at most this many elements (64 MiB)."""

Head = Callable[[torch.Tensor], torch.Tensor]


def nucleus_mask(logits_RV: torch.Tensor, top_p: torch.Tensor | float, keep_R: torch.Tensor | None) -> torch.Tensor:
    """True for the smallest set of most likely tokens whose mass reaches `top_p`, and for `keep` (arXiv:1904.09751).

    `keep` is the token that was sampled: with the sampler's rounding it can stand just outside our own nucleus.
    """
    probs, order = torch.softmax(logits_RV, dim=-1).sort(dim=-1, descending=True)
    before = probs.cumsum(-1) - probs
    mask = torch.zeros_like(logits_RV, dtype=torch.bool).scatter_(-1, order, before < top_p)
    mask[torch.arange(len(mask), device=mask.device), order[:, 0]] = True
    if keep_R is not None:
        mask[torch.arange(len(mask), device=mask.device), keep_R] = True
    return mask


def _shape_logits(logits_RV: torch.Tensor, targets_R: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """fp32 logits of the distribution that tokens are drawn from."""
    logits = logits_RV.float()
    if temperature != 1.0:
        logits = logits / temperature
    if top_p < 1.0:
        logits = logits.masked_fill(~nucleus_mask(logits, top_p, targets_R), float("-inf"))
    return logits


class _TokenLogProbs(torch.autograd.Function):
    """Saves hidden states and targets; backward computes each chunk's logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RN: torch.Tensor,
        targets_R: torch.Tensor,
        head: Head,
        temperature: float,
        top_p: float,
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies = [], []
        for start in range(0, len(targets_R), rows):
            part = slice(start, start + rows)
            logits = _shape_logits(head(hidden_RN[part]), targets_R[part], temperature, top_p)
            all_logprobs = torch.log_softmax(logits, dim=-1)
            logprobs.append(all_logprobs.gather(-1, targets_R[part, None])[:, 0])
            # A token outside the nucleus has probability 0 and log-prob -inf: it adds nothing.
            entropies.append(-(all_logprobs.exp() * all_logprobs.clamp(min=torch.finfo(torch.float32).min)).sum(-1))
        ctx.save_for_backward(hidden_RN, targets_R)
        ctx.settings = (head, temperature, top_p, rows)
        return torch.cat(logprobs), torch.cat(entropies)

    @staticmethod
    def backward(
        ctx: Any, grad_R: torch.Tensor, _entropy_grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None, None]:
        hidden_RN, targets_R = ctx.saved_tensors
        head, temperature, top_p, rows = ctx.settings
        grad_hidden = torch.empty_like(hidden_RN)
        for start in range(0, len(targets_R), rows):
            part = slice(start, start + rows)
            with torch.enable_grad():
                hidden = hidden_RN[part].detach().requires_grad_(True)
                logits = head(hidden)
            # d logp(y) / d logits = (onehot(y) - softmax) / T
            slope = torch.softmax(_shape_logits(logits.detach(), targets_R[part], temperature, top_p), dim=-1).neg_()
            slope[torch.arange(len(slope), device=slope.device), targets_R[part]] += 1.0
            slope.mul_(grad_R[part, None] / temperature)
            (grad_hidden[part],) = torch.autograd.grad(logits, hidden, slope.to(logits.dtype))
        return grad_hidden, None, None, None, None, None


def token_logprobs(
    hidden_RN: torch.Tensor,
    targets_R: torch.Tensor,
    head: Head,
    *,
    vocabulary: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 `(logprobs [R], entropies [R])` of `targets` under softmax(head(hidden) / temperature), cut to the nucleus.

    The head is frozen: gradients flow to `hidden` through the log-probs; entropies carry none.
    """
    rows = max(1, chunk_elements // vocabulary)
    logprobs, entropies = _TokenLogProbs.apply(hidden_RN, targets_R, head, temperature, top_p, rows)
    return logprobs, entropies.detach()
