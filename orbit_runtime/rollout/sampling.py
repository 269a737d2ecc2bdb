"""Tokens from logits: counter-based uniforms and inverse-CDF draws.

Belongs here: all randomness of an engine. Does not belong here: the composition of the batch. A row's draw depends only
on its key and position, so how a batch is composed changes nothing but rounding.

Legend: `B` rows, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from orbit_runtime.algorithms.distribution import truncate

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(keys_B: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """float64 in [0, 1), one per (key, position): output `position` of SplitMix64 seeded with the key.

    Args:
        keys_B: uint64 stream keys (`seeds.stream_key`).
        positions_B: number of tokens that the row has sampled before.

    Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014), figure 17; the top 53 bits.
    """
    z = keys_B + (positions_B.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True)
class Truncation:
    """`[B, 1]` each, or `None` if it truncates no row (`algorithms.distribution.truncate`)."""

    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None


WHOLE = Truncation()


def draw(
    logits_BV: torch.Tensor,
    uniforms_B: torch.Tensor,
    temperature_B1: torch.Tensor | None,
    truncation: Truncation = WHOLE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples one token per row; returns `(tokens [B] int64, logprobs [B] fp32)` under the distribution drawn from.

    Args:
        logits_BV: fp32.
        uniforms_B: float64 in [0, 1).
        temperature_B1: a row at exactly 0 is greedy, with its log-prob at temperature 1. `None`: 1 in every row.
        truncation: how each row's distribution is truncated.
    """
    logprobs = _distribution(logits_BV, temperature_B1, truncation)
    # float64: over a large vocabulary an fp32 sum drops the tail.
    cdf = torch.exp(logprobs).cumsum(-1, dtype=torch.float64)
    # The first token whose cumulative mass exceeds the draw has mass itself, even if u rounds up to the total.
    targets = (uniforms_B[:, None] * cdf[:, -1:]).clamp_(max=torch.finfo(torch.float64).max)
    tokens = torch.searchsorted(cdf, targets, right=True).clamp_(max=logprobs.shape[-1] - 1)
    if temperature_B1 is not None:
        tokens = torch.where(temperature_B1 == 0, logits_BV.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def most_probable(
    logits_BV: torch.Tensor, temperature_B1: torch.Tensor | None, truncation: Truncation, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` most probable tokens of each row under the distribution that `draw` samples from, in order of
    probability: `(tokens [B, K] int64, logprobs [B, K])`, with -inf for a truncated token."""
    logprobs, tokens = _distribution(logits_BV, temperature_B1, truncation).topk(min(count, logits_BV.shape[-1]), -1)
    return tokens, logprobs


def _distribution(logits_BV: torch.Tensor, temperature_B1: torch.Tensor | None, truncation: Truncation) -> torch.Tensor:
    """Log-probs; for a greedy row those at temperature 1."""
    logits = logits_BV if temperature_B1 is None else logits_BV / torch.where(temperature_B1 == 0, 1.0, temperature_B1)
    logits = truncate(logits, truncation.top_k, truncation.top_p, truncation.min_p)
    return torch.log_softmax(logits, dim=-1)
