"""A critic: a second adapter with a value head, over the layers of the policy's base, with its own optimiser.

Belongs here: computing token values, and updating the adapter and head that compute them. Does not belong here: the
policy's updates (`updater`), the value loss (`algorithms.values`), advantages.

Legend: `R` trained tokens of a micro-batch, `N` hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from orbit_runtime.adapters.inject import add_masters
from orbit_runtime.adapters.layer import CRITIC_SLOT
from orbit_runtime.algorithms.values import value_loss
from orbit_runtime.policy.model import Policy
from orbit_runtime.seeds import stream_key
from orbit_runtime.training.micro_batches import MicroBatch
from orbit_runtime.training.settings import CriticSettings, TrainerSettings
from orbit_runtime.types import Sample


class Critic:
    """Initially predicts 0, because its head is 0. It uses no dropout, and its tokens go where the routers choose."""

    def __init__(self, policy: Policy, settings: TrainerSettings, critic: CriticSettings) -> None:
        self._policy = policy
        self._max_grad_norm = settings.max_grad_norm
        self.settings = critic
        own = policy.injected.config
        adapter = own if critic.rank is None else replace(own, rank=critic.rank)
        self._masters = add_masters(policy.injected, CRITIC_SLOT, adapter, stream_key(settings.seed, "critic"))
        width = policy.model.get_output_embeddings().in_features
        self._weight_N = nn.Parameter(torch.zeros(width, device=policy.device))
        self._bias = nn.Parameter(torch.zeros(1, device=policy.device))
        self.parameters = {
            **self._masters.parameters,
            "value_head.weight": self._weight_N,
            "value_head.bias": self._bias,
        }
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=critic.peak_learning_rate,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.updates = 0
        """Optimiser updates since the run began."""

    def values(self, micro: MicroBatch) -> Tensor:
        """fp32 `[R]`, without gradient: the value predicted before each trained token."""
        with torch.no_grad(), self._policy.injected.selection.use(CRITIC_SLOT):
            return self._values(micro)

    def _values(self, micro: MicroBatch) -> Tensor:
        hidden_RN = self._policy.target_hidden(micro.packed)[micro.trained_R]
        return hidden_RN.float() @ self._weight_N + self._bias

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Adds the gradient of one mini-batch; returns its loss."""
        total, selection = 0.0, self._policy.injected.selection
        for micro in micro_batches:
            # Recomputed layers select the adapter again, so an engine in another thread waits for backward too.
            with selection.turn:
                with selection.use(CRITIC_SLOT):
                    values_R = self._values(micro)
                loss = value_loss(
                    values_R,
                    micro.columns_R["value"],
                    micro.columns_R["return"],
                    micro.weights_R,
                    clip=self.settings.value_clip,
                )
                loss.backward()
            total += float(loss.detach())
        return total

    def apply_gradient(self, rate: float) -> float:
        """Returns the gradient norm before clipping; if it is not finite, nothing was changed."""
        gradients = [each.grad for each in self.parameters.values() if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if torch.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self._max_grad_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.updates += 1
            self._masters.after_update()
        self.optimizer.zero_grad(set_to_none=True)
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
