"""Trainer against sampler on the run's own tokens: sums over micro-batches, then statistics.

Belongs here: the arithmetic of the comparison. Does not belong here: limits and gates (`orbit_runtime.parity`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

K3_CLAMP = 10.0
RATIOS = (0.9, 1.1)


class ParitySums:
    """Collects `d = logp_trainer - logp_sampler` over the first mini-batch, where both sides hold the same policy."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    def add(self, trainer_R: torch.Tensor, sampler_R: torch.Tensor, stale_R: torch.Tensor | None) -> None:
        """Args: stale_R: 1 where another policy sampled the token; None if there is no such token."""
        d_R = trainer_R - sampler_R
        self._parts.append(d_R if stale_R is None else d_R[stale_R == 0])

    def metrics(self, collect: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Statistics over all tokens; empty if there are none.

        `parity_mean, parity_p99, parity_max` of |d|; `parity_k3`: mean of exp(d) - 1 - d, d clamped to ±10;
        `parity_outside`: share of tokens with exp(d) outside [0.9, 1.1], NaN included; `parity_tokens`.

        Args:
            collect: maps this replica's values to those of all replicas.
        """
        d = collect(torch.cat(self._parts) if self._parts else torch.zeros(0)).double()
        if not d.numel():
            return {}
        size = d.abs()
        low, high = (math.log(ratio) for ratio in RATIOS)
        inside = (d >= low) & (d <= high)
        clamped = d.clamp(-K3_CLAMP, K3_CLAMP)
        return {
            "parity_mean": float(size.mean()),
            "parity_p99": float(torch.quantile(size, 0.99)) if size.numel() < 1 << 24 else float(size.max()),
            "parity_max": float(size.max()),
            "parity_k3": float((torch.expm1(clamped) - clamped).mean()),
            "parity_outside": float((~inside).double().mean()),
            "parity_tokens": d.numel(),
        }
