"""Batches of random log-probs in both shapes: padded `[D, T]` as other libraries have them, and flat as ours are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orbit_runtime.algorithms.losses import LossInputs, token_weights
from orbit_runtime.algorithms.objective import build_loss
from orbit_runtime.algorithms.ratios import importance_weights
from orbit_runtime.algorithms.table import correction_of, loss_settings
from orbit_runtime.spec.algorithm import Algorithm

LONGEST = 7
LENGTHS = (7, 1, 4, 3, 7, 2)


@dataclass(frozen=True)
class Batch:
    """Two groups of three; fp64. Everything is `[D, T]`, but for `advantages [D]`."""

    logprobs: Tensor
    old: Tensor
    sampled: Tensor
    reference: Tensor
    mask: Tensor
    advantages: Tensor

    @property
    def kept(self) -> Tensor:
        return self.mask.bool()


def random_batch(seed: int, lengths: Sequence[int] = LENGTHS, spread: float = 0.3) -> Batch:
    """`spread` is how far the policies are apart."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(LONGEST, *lengths))

    def noise(scale: float) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    logprobs = -torch.rand(shape, generator=generator, dtype=torch.float64) * 3
    old = logprobs + noise(spread)
    mask = (torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]).long()
    return Batch(
        logprobs,
        old,
        sampled=old + noise(spread),
        reference=logprobs + noise(0.2),
        mask=mask,
        advantages=torch.randn(len(lengths), generator=generator, dtype=torch.float64),
    )


def our_loss(
    batch: Batch,
    settings: Algorithm,
    rows: Sequence[int] | None = None,
    *,
    logprobs: Tensor | None = None,
    **own: Any,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Loss, sums and the gradient of `logprobs [D, T]`, as the trainer calls what a manifest names.

    Args:
        rows: the samples of one micro-batch; the weights stay those of the whole batch.
    """
    chosen = list(range(len(batch.mask)) if rows is None else rows)
    given = (batch.logprobs if logprobs is None else logprobs).clone().requires_grad_(True)
    policy_loss, correction = build_loss(settings, **own), correction_of(settings)
    lengths = batch.mask.sum(-1)
    weights = torch.tensor(token_weights(lengths.tolist(), settings.objective.reduction, LONGEST), dtype=torch.float64)[
        :, None
    ].expand(batch.mask.shape)

    def flat(values: Tensor) -> Tensor:
        return torch.cat([values[row][batch.kept[row]] for row in chosen])

    importance = None
    if correction is not None:
        importance = importance_weights(flat(batch.old), flat(batch.sampled), lengths[chosen], correction)
    inputs = LossInputs(
        flat(given),
        flat(batch.old),
        flat(batch.advantages[:, None].expand(batch.mask.shape)),
        lengths[chosen],
        reference_logprobs_T=flat(batch.reference),
        importance_T=importance,
    )
    loss, sums = policy_loss(inputs, flat(weights), loss_settings(settings))
    loss.backward()
    assert given.grad is not None
    return loss.detach(), sums, given.grad
