"""The value model of a critic: a second adapter around the layers of the policy's base, and a head over what they give.

Legend: `R` trained tokens of a micro-batch, `N` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from orbit_runtime.adapters.inject import add_masters
from orbit_runtime.adapters.layer import CRITIC_SLOT
from orbit_runtime.adapters.masters import MasterPlace
from orbit_runtime.adapters.part import WeightPart
from orbit_runtime.policy.model import Policy
from orbit_runtime.seeds import stream_key
from orbit_runtime.training.micro_batches import MicroBatch
from orbit_runtime.training.passes import squared_norm
from orbit_runtime.workers.child.heartbeat import device_work

HEAD = "value_head"


class ValueModel:
    """Initially predicts 0, because its head is 0. It uses no dropout, and its tokens go where the routers choose.

    Its passes are `policy`'s, with `CRITIC_SLOT` selected.
    """

    def __init__(self, policy: Policy, seed: int, rank: int | None, *, has_head: bool = True) -> None:
        """
        Args:
            seed: of the run.
            rank: LoRA rank; None for the policy's.
            has_head: whether this process holds the policy's last layer, and so the head.
        """
        self.policy = policy
        own = policy.injected.config
        adapter = own if rank is None else replace(own, rank=rank)
        self.adapter = add_masters(policy.injected, CRITIC_SLOT, adapter, stream_key(seed, "critic"))
        head: dict[str, nn.Parameter] = {}
        if has_head:
            width = policy.model.get_output_embeddings().in_features
            head = {
                f"{HEAD}.{kind}": nn.Parameter(torch.zeros(size, device=policy.device))
                for kind, size in (("weight", width), ("bias", 1))
            }
        self._head = head
        self.parameters: Mapping[str, nn.Parameter] = {**self.adapter.parameters, **head}
        """fp32: the adapter's, and `value_head.weight` `[N]` and `value_head.bias` `[1]`."""
        outside = WeightPart(group="tokens")
        self.places: Mapping[str, MasterPlace] = {
            **self.adapter.places,
            **{name: MasterPlace(name.rpartition(".")[2], outside, tuple(each.shape)) for name, each in head.items()},
        }

    def trained(self, micro: MicroBatch) -> Tensor:
        """fp32 `[R]`: the value predicted before each trained token."""
        hidden_RN = self.policy.target_hidden(micro.packed)
        return self.policy.values_of(hidden_RN, micro.packed, micro.trained_R, self._read)

    def _read(self, hidden_RN: Tensor) -> Tensor:
        return hidden_RN.float() @ self._head[f"{HEAD}.weight"] + self._head[f"{HEAD}.bias"]


ValueLossOf = Callable[[MicroBatch, Tensor], Tensor]
"""(micro-batch, fp32 values `[R]`) → the scalar to run backward from."""


class ValuePasses(Protocol):
    """Like `passes.Passes`: with several ranks, every rank calls every method, in the same order."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters of the value model that this process holds."""
        ...

    @property
    def owned(self) -> Mapping[str, nn.Parameter]:
        """The parameters that this process updates, and keeps moments of."""
        ...

    def values(self, micro: MicroBatch) -> Tensor:
        """fp32 `[R]` without gradient. A process without the last layer returns zeros."""
        ...

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss_of: ValueLossOf) -> None:
        """Adds the gradient of each micro-batch's loss. Processes without the last layer do not call `loss_of`."""
        ...

    def finish_gradients(self) -> Tensor:
        """Completes the gradients of `owned`; returns the norm of all parameters' gradients."""
        ...

    def finish_update(self) -> None:
        """Call after `owned` was updated."""
        ...


class LocalValues:
    """A policy whose passes return every value in this process."""

    def __init__(self, model: ValueModel) -> None:
        self._model = model
        self.parameters = model.parameters
        self.owned = model.parameters
        self.finish_update = model.adapter.after_update

    def values(self, micro: MicroBatch) -> Tensor:
        policy = self._model.policy
        with (
            torch.no_grad(),
            policy.injected.selection.use(CRITIC_SLOT),
            device_work("a micro-batch of values", policy.device.type),
        ):
            return self._model.trained(micro)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss_of: ValueLossOf) -> None:
        policy = self._model.policy
        selection = policy.injected.selection
        for micro in micro_batches:
            # Recomputed layers select the adapter again, so an engine in another thread waits for backward too.
            with selection.turn, device_work("a micro-batch of the critic's training", policy.device.type):
                with selection.use(CRITIC_SLOT):
                    values_R = self._model.trained(micro)
                loss_of(micro, values_R).backward()

    def finish_gradients(self) -> Tensor:
        return squared_norm(self.parameters.values(), self._model.policy.device).sqrt()
