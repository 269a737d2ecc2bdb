"""`ValuePasses` for ranks: each rank computes a critic's values with its part of the model.

Belongs here: a critic's passes over replicas and stages. Does not belong here: its updates (`training.critic`), the
policy's passes (`passes`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from orbit_runtime.adapters.layer import CRITIC_SLOT
from orbit_runtime.training.megatron.groups import Groups
from orbit_runtime.training.megatron.model import RankPolicy
from orbit_runtime.training.megatron.owners import Owners
from orbit_runtime.training.megatron.pipeline import Begun
from orbit_runtime.training.micro_batches import MicroBatch
from orbit_runtime.training.values import LocalValues, ValueLossOf, ValueModel


class RankValues:
    """Every rank calls every method, in the same order. All ranks of a replica's last stage get the same values."""

    def __init__(self, held: RankPolicy, groups: Groups, model: ValueModel) -> None:
        """Args: model: around this rank's part; it has a head on the last stage."""
        self._model = model
        self._local = LocalValues(model)
        self._pipeline = held.pipeline
        self._is_last = groups.is_last_stage
        self._owners = Owners(groups, model.parameters, model.places)
        self.parameters = model.parameters
        self.owned = self._owners.owned
        self.copied = self._owners.copied
        """Those of `parameters` that other ranks hold too."""

    def values(self, micro: MicroBatch) -> Tensor:
        if self._is_last:
            return self._local.values(micro)
        policy = self._model.policy
        with torch.no_grad(), policy.injected.selection.use(CRITIC_SLOT):
            policy.through(micro.packed)
        return torch.zeros(len(micro.trained_R), device=policy.device)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss_of: ValueLossOf) -> None:
        pipeline, policy = self._pipeline, self._model.policy
        if pipeline is None:
            self._local.forward_backward(micro_batches, loss_of)
            return

        def begin(micro: MicroBatch) -> Begun:
            with policy.injected.selection.use(CRITIC_SLOT):
                root = loss_of(micro, self._model.trained(micro)) if pipeline.is_last else policy.through(micro.packed)
            return Begun(root, pipeline.take_entered())

        pipeline.run(micro_batches, begin, pipeline.finish)

    def finish_gradients(self) -> Tensor:
        self._owners.collect_gradients()
        return self._owners.norm()

    def finish_update(self) -> None:
        self._owners.share_values()
        self._model.adapter.after_update()
