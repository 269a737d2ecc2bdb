"""`Passes` of ranks: each computes with its part of the model, on the micro-batches of its replica.

Belongs here: what a step sums over replicas and parts. Does not belong here: the collectives inside a pass (`regions`),
the arithmetic of a step (`training.updater`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed

from orbit_runtime.policy.model import Policy
from orbit_runtime.policy.routing import OWN_CHOICE
from orbit_runtime.training.megatron.gradients import RankGradients
from orbit_runtime.training.megatron.groups import Groups
from orbit_runtime.training.micro_batches import MicroBatch
from orbit_runtime.training.passes import LossOf, TrainingPass, accumulate, no_gradient
from orbit_runtime.types import Sampling


class RankPasses:
    """Every rank calls everything, in the same order. Ranks of one replica get the same log-probs and losses."""

    def __init__(self, policy: Policy, groups: Groups) -> None:
        """Args: policy: this rank's part (`load_rank_policy`)."""
        self._policy = policy
        self._groups = groups
        self._gradients = RankGradients(groups, policy.injected.masters.places)
        self.device = policy.device
        self.masters = policy.injected.masters
        self.routing = policy.routing
        self.pack = policy.pack
        self.replica = (groups.replicas.rank(), groups.replicas.size())

    def logprobs(self, micro: MicroBatch, sampling: Sampling, *, adapter: bool, routed_TLC: Tensor | None) -> Tensor:
        return no_gradient(self._policy, micro, sampling, adapter=adapter, routed_TLC=self._met(micro, routed_TLC))

    def forward_backward(self, passes: Iterable[TrainingPass], sampling: Sampling, loss_of: LossOf) -> None:
        met = (replace(each, routed_TLC=self._met(each.micro, each.routed_TLC)) for each in passes)
        accumulate(self._policy, met, sampling, loss_of)

    def _met(self, micro: MicroBatch, routed_TLC: Tensor | None) -> Tensor | None:
        """Where routers see other ranks' tokens as well, all of them are given experts or none is."""
        routing, group = self.routing, self._groups.tokens
        if routing is None or group.size() == 1:
            return routed_TLC
        given = torch.tensor([routed_TLC is not None], dtype=torch.int32, device=self.device)
        distributed.all_reduce(given, op=distributed.ReduceOp.MAX, group=group)
        if routed_TLC is not None or not int(given):
            return routed_TLC
        shape = (len(micro.packed.token_ids_T), len(routing.layers), routing.experts_per_token)
        return torch.full(shape, OWN_CHOICE, dtype=torch.int16, device=self.device)

    def finish_gradients(self) -> Tensor:
        self._gradients.finish(self.masters.parameters)
        return self._gradients.norm(self.masters.parameters)

    def total(self, values: Mapping[str, float]) -> dict[str, float]:
        """Added up in the order of replicas. One that had nothing to count knows no names."""
        summed: dict[str, float] = {}
        for each in self._gathered(dict(values)):
            for name, value in each.items():
                summed[name] = summed.get(name, 0.0) + value
        return summed

    def largest(self, value: float) -> float:
        largest = torch.tensor([value], dtype=torch.float64, device=self.device)
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
        return float(largest)

    def collect(self, values_R: Tensor) -> Tensor:
        return torch.cat([each.to(self.device) for each in self._gathered(values_R.cpu())])

    def _gathered(self, own: Any) -> list[Any]:
        group = self._groups.replicas
        found: list[Any] = [None] * group.size()
        if len(found) == 1:
            return [own]
        distributed.all_gather_object(found, own, group=group)
        return found
