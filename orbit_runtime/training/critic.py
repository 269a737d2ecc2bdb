"""A critic's updates: the value loss, and an optimiser of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from orbit_runtime.algorithms.losses import value_loss
from orbit_runtime.training.micro_batches import MicroBatch
from orbit_runtime.training.passes import ValuePasses
from orbit_runtime.training.settings import CriticSettings, TrainerSettings
from orbit_runtime.types import Sample


class Critic:
    """The value model. Each of several ranks has one, and all get the same calls in the same order."""

    def __init__(self, passes: ValuePasses, settings: TrainerSettings, critic: CriticSettings) -> None:
        self._passes = passes
        self._max_grad_norm = settings.training.max_grad_norm
        self.settings = critic
        self.parameters, self.owned, self.values = passes.parameters, passes.owned, passes.values
        self.optimizer = torch.optim.AdamW(
            # A rank may own nothing: a group of parameters may be empty, a list of them may not.
            [{"params": list(self.owned.values())}],
            lr=critic.peak_learning_rate,
            weight_decay=settings.training.weight_decay,
            fused=True,
        )
        self.updates = 0
        """Optimiser updates since the run began."""

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Adds the gradient of one mini-batch; returns the loss of the micro-batches that this replica counts."""
        total = 0.0

        def loss_of(micro: MicroBatch, values_R: Tensor) -> Tensor:
            nonlocal total
            loss = value_loss(
                values_R,
                micro.columns_R["value"],
                micro.columns_R["return"],
                micro.weights_R,
                clip=self.settings.value_clip,
            )
            if not micro.counts:
                return 0.0 * loss
            total += float(loss.detach())
            return loss

        self._passes.forward_backward(micro_batches, loss_of)
        return total

    def apply_gradient(self, rate: float) -> float:
        """Returns the gradient norm before clipping; if it is not finite, nothing was changed."""
        norm = self._passes.finish_gradients()
        is_finite = bool(torch.isfinite(norm))
        if is_finite:
            torch.nn.utils.clip_grads_with_norm_(self.owned.values(), self._max_grad_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.updates += 1
        for each in self.parameters.values():
            each.grad = None
        if is_finite:
            self._passes.finish_update()
        return float(norm)


def explained_variance(samples_D: Sequence[Sample]) -> dict[str, float]:
    """1 - Var(return - value) / Var(return) over the trained tokens; empty if all returns are equal."""
    kept_D = [np.flatnonzero(sample.loss_mask_T) for sample in samples_D]
    returns_T, values_T = (
        np.concatenate([
            np.asarray(sample.columns[name], np.float64)[kept] for sample, kept in zip(samples_D, kept_D, strict=True)
        ])
        for name in ("return", "value")
    )  # fmt: skip
    spread = float(returns_T.var())
    return {"explained_variance": 1.0 - float((returns_T - values_T).var()) / spread} if spread > 0 else {}
