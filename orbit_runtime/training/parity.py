"""Trainer against sampler on the run's own tokens: sums over micro-batches, then statistics.

Belongs here: the arithmetic of the comparison. Does not belong here: limits and gates (`orbit_runtime.parity`).
"""

from __future__ import annotations

import torch

K3_CLAMP = 10.0


class ParitySums:
    """Collects `d = logp_trainer - logp_sampler` of the first mini-batch, where both sides hold one policy."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    def add(self, trainer_R: torch.Tensor, sampler_R: torch.Tensor) -> None:
        self._parts.append(trainer_R - sampler_R)

    def metrics(self) -> dict[str, float]:
        """`parity_mean, parity_p99, parity_max` of |d|, and `parity_k3`: mean of exp(d) - 1 - d, d clamped to ±10."""
        if not self._parts:
            return {}
        d = torch.cat(self._parts).double()
        if not d.numel():
            return {}
        size = d.abs()
        clamped = d.clamp(-K3_CLAMP, K3_CLAMP)
        return {
            "parity_mean": float(size.mean()),
            "parity_p99": float(torch.quantile(size, 0.99)) if size.numel() < 1 << 24 else float(size.max()),
            "parity_max": float(size.max()),
            "parity_k3": float((torch.expm1(clamped) - clamped).mean()),
        }
