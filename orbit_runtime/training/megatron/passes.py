"""`Passes` and `ValuePasses` for ranks: each computes with its part of the model, on the micro-batches of its replica.

Belongs here: sums of a step over replicas and parts. Does not belong here: the collectives inside a pass (`regions`),
the arithmetic of a step (`training.updater`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from orbit_runtime.adapters.layer import CRITIC_SLOT, TRAINER_SLOT
from orbit_runtime.policy.routing import OWN_CHOICE
from orbit_runtime.training.megatron.groups import Groups
from orbit_runtime.training.megatron.model import RankPolicy
from orbit_runtime.training.megatron.owners import Owners
from orbit_runtime.training.megatron.pipeline import ForwardHalf, Pipeline
from orbit_runtime.training.micro_batches import MicroBatch
from orbit_runtime.training.passes import (
    LocalPasses,
    LocalValues,
    LossOf,
    Teacher,
    TrainingPass,
    ValueLossOf,
    ValueModel,
)
from orbit_runtime.types import Computed, Sampling


class RankPasses:
    """Every rank calls every method, in the same order. All ranks of a replica's last stage get the same log-probs and
    losses."""

    def __init__(self, held: RankPolicy, groups: Groups, teacher: Teacher | None = None) -> None:
        """
        Args:
            held: this rank's part (`load_rank_policy`).
            teacher: if samples hold its report, the policy is compared with it in each training pass.
        """
        policy = held.policy
        self._teacher = teacher if teacher and teacher.compares else None
        self._policy, self._pipeline = policy, held.pipeline
        self._local = LocalPasses(policy, teacher)
        self._groups = groups
        self._owners = Owners(groups, policy.injected.masters.parameters, policy.injected.masters.places)
        self.device = policy.device
        self.masters = policy.injected.masters
        self.owned = self._owners.owned
        self.routing = policy.routing
        self.pack = policy.pack
        self.replica = (groups.data.rank(), groups.data.size())
        self.leads = groups.leads
        counts = _gather(len(policy.routing.layers) if policy.routing else 0, groups.pipeline)
        before = sum(counts[: groups.pipeline.rank()])
        self._routed = slice(before, before + counts[groups.pipeline.rank()])
        self.routes = sum(counts) > 0

    def own_layers(self, routed_TLC: Any) -> Any:
        """Cuts experts given for all layers to this stage's layers; None if none are given, or it has no routers."""
        return None if routed_TLC is None or self.routing is None else routed_TLC[:, self._routed]

    def routed_tokens(self, micro: MicroBatch) -> Tensor | None:
        return self.own_layers(micro.routed_tokens()) if self.routes else None  # type: ignore[no-any-return]

    def logprobs(self, micro: MicroBatch, sampling: Sampling, *, of: Computed, routed_TLC: Tensor | None) -> Tensor:
        routed_TLC = self._met(micro, routed_TLC)
        if self._groups.is_last_stage:
            return self._local.logprobs(micro, sampling, of=of, routed_TLC=routed_TLC)
        policy = self._policy
        with torch.no_grad(), policy.injected.selection.use(TRAINER_SLOT if of == "policy" else None):
            policy.through(micro.packed, routed_TLC)
        return torch.zeros(len(micro.packed.target_ids_R), device=self.device)

    def forward_backward(self, passes: Iterable[TrainingPass], sampling: Sampling, loss_of: LossOf) -> None:
        met = (replace(each, routed_TLC=self._met(each.micro, each.routed_TLC)) for each in passes)
        if self._pipeline is None:
            self._local.forward_backward(met, sampling, loss_of)
            return
        self._pipeline.run(met, partial(self._begin, self._pipeline, sampling, loss_of), self._pipeline.finish)

    def _begin(self, pipeline: Pipeline, sampling: Sampling, loss_of: LossOf, each: TrainingPass) -> ForwardHalf:
        policy, packed, teacher, distances_R = self._policy, each.micro.packed, self._teacher, None
        with policy.injected.selection.use(TRAINER_SLOT, dropout=each.dropout):
            if not pipeline.is_last:
                return ForwardHalf(policy.through(packed, each.routed_TLC), pipeline.take_entered())
            hidden_RN = policy.target_hidden(packed, each.routed_TLC)
            logprobs_R, entropy_R = policy.logprobs_of(hidden_RN, packed, sampling=sampling, seen=each.micro.seen)
            if teacher is not None:
                distances_R = teacher.distances(hidden_RN, each.micro, teacher.outputs(each.micro, None))
        return ForwardHalf(loss_of(each.micro, logprobs_R, entropy_R, distances_R), pipeline.take_entered())

    def _met(self, micro: MicroBatch, routed_TLC: Tensor | None) -> Tensor | None:
        """The experts of all tokens that this rank's routers see; None if none are given. Either all of these tokens
        are given experts or none are.
        """
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
        self._owners.collect_gradients()
        return self._owners.norm()

    def finish_update(self) -> None:
        self._owners.share_values()
        self.masters.after_update()

    def total(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums in the order of ranks. A rank that had nothing to count sends no names."""
        summed = _added(_gather(dict(values), self._groups.replicas))
        return _added(_gather(summed, self._groups.pipeline))

    def largest(self, value: float) -> float:
        largest = torch.tensor([value], dtype=torch.float64, device=self.device)
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
        return float(largest)

    def collect(self, values_R: Tensor) -> Tensor:
        own = values_R.cpu() if self.leads else values_R.new_empty(0).cpu()
        known = torch.cat(_gather(own, self._groups.replicas))
        return _gather(known, self._groups.pipeline)[-1].to(self.device)  # type: ignore[no-any-return]


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

        def begin(micro: MicroBatch) -> ForwardHalf:
            with policy.injected.selection.use(CRITIC_SLOT):
                root = loss_of(micro, self._model.trained(micro)) if pipeline.is_last else policy.through(micro.packed)
            return ForwardHalf(root, pipeline.take_entered())

        pipeline.run(micro_batches, begin, pipeline.finish)

    def finish_gradients(self) -> Tensor:
        self._owners.collect_gradients()
        return self._owners.norm()

    def finish_update(self) -> None:
        self._owners.share_values()
        self._model.adapter.after_update()


def _added(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    summed: dict[str, float] = {}
    for values in each:
        for name, value in values.items():
            summed[name] = summed.get(name, 0.0) + value
    return summed


def _gather(own: Any, group: distributed.ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * group.size()
    if len(found) == 1:
        return [own]
    distributed.all_gather_object(found, own, group=group)
    return found
