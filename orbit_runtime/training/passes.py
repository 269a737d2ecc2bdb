"""The interface between a step and what computes its passes: a policy in this process, or ranks that each hold a part.

Belongs here: the protocols of a policy and of a critic's value model, their implementations in this process, and a
teacher's part of them. Does not belong here: the order of passes and the use of their results (`updater`), ranks
(`megatron`).

Legend: `R` targets of a micro-batch (of value model and teacher: its trained tokens), `N` hidden size.
"""

from __future__ import annotations

from collections.abc import Buffer, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from orbit_runtime.adapters.inject import add_masters
from orbit_runtime.adapters.layer import CRITIC_SLOT, TRAINER_SLOT, Dropout
from orbit_runtime.adapters.masters import MasterPlace, Masters, Trainable
from orbit_runtime.adapters.part import WeightPart
from orbit_runtime.adapters.tensorfile import TensorFile
from orbit_runtime.policy.distance import TeacherReport
from orbit_runtime.policy.model import Policy
from orbit_runtime.policy.packed import Branch, PackedBatch
from orbit_runtime.policy.routing import Routing
from orbit_runtime.seeds import stream_key
from orbit_runtime.training.micro_batches import MicroBatch
from orbit_runtime.training.settings import TeacherSettings
from orbit_runtime.training.state import build_state, unpack_state
from orbit_runtime.types import TEACHER_SLOT, Computed, Sampling
from orbit_runtime.workers.child.heartbeat import device_work


@dataclass(frozen=True, slots=True)
class TrainingPass:
    """One forward and backward pass."""

    micro: MicroBatch
    routed_TLC: Tensor | None
    """Experts that its tokens are sent to; None if the routers choose."""
    dropout_key: int

    @property
    def dropout(self) -> Dropout:
        packed = self.micro.packed
        return Dropout(self.dropout_key, packed.places_T, packed.num_tokens)


LossOf = Callable[[MicroBatch, Tensor, Tensor, Tensor | None], Tensor]
"""(micro-batch, fp32 log-probs `[R]`, entropies `[R]`, distances of the trained tokens from the teacher) → the scalar
to run backward from."""


class Passes(Protocol):
    """Passes over micro-batches. Every one of several ranks calls every method, in the same order."""

    @property
    def device(self) -> torch.device: ...

    @property
    def masters(self) -> Trainable:
        """The masters that this process holds."""

    @property
    def owned(self) -> Mapping[str, nn.Parameter]:
        """The masters that this process updates, and keeps moments of."""

    @property
    def leads(self) -> bool:
        """Whether this process reports what all processes of a replica know, or what only one of them knows: log-probs
        and quantities computed from them."""

    @property
    def routes(self) -> bool:
        """Whether layers of any process have routed experts that can be given."""

    @property
    def routing(self) -> Routing | None:
        """Routing of this process's layers."""

    @property
    def replica(self) -> tuple[int, int]:
        """This process's index among the replicas of the model, which train on different samples, and their number."""

    def pack(self, branches: Sequence[Branch]) -> PackedBatch: ...

    def routed_tokens(self, micro: MicroBatch) -> Tensor | None:
        """Experts chosen during rollout, for this process's layers and tokens."""

    def logprobs(self, micro: MicroBatch, sampling: Sampling, *, of: Computed, routed_TLC: Tensor | None) -> Tensor:
        """fp32 `[R]` without gradient, of `policy`, `reference` or `base`. A process without the output layer returns
        zeros."""

    def forward_backward(self, passes: Iterable[TrainingPass], sampling: Sampling, loss_of: LossOf) -> None:
        """Adds the gradient of each pass's loss to the masters. Draws a pass only when the previous one is done."""

    def finish_gradients(self) -> Tensor:
        """Sums gradients over replicas and parts, which completes the gradient of every master in `owned`. Returns the
        total norm."""

    def finish_update(self) -> None:
        """Call after the masters in `owned` were updated: afterwards every process has all values of its masters."""

    def total(self, values: Mapping[str, float]) -> dict[str, float]:
        """The sum of each value over all processes; processes that divide the same matrices count once."""

    def largest(self, value: float) -> float:
        """The maximum over all processes."""

    def collect(self, values_R: Tensor) -> Tensor:
        """Values of all replicas, concatenated, as the leading processes know them."""


def squared_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """The sum of their gradients' squares, in fp64: over millions of values, fp32 is off by 1e-5."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    norms = torch._foreach_norm(gradients, 2, torch.float64) if gradients else ()
    return torch.stack([torch.zeros((), dtype=torch.float64, device=device), *norms]).square().sum()


class LocalPasses:
    """A policy whose passes return every log-prob in this process."""

    replica = (0, 1)
    leads = True

    def __init__(self, policy: Policy, teacher: Teacher | None = None) -> None:
        """Args: teacher: its distribution is compared with the policy's in each training pass; None: not compared."""
        self._policy = policy
        self._teacher = teacher
        self.device = policy.device
        self.masters: Trainable = policy.whole or policy.injected.masters
        self.owned = self.masters.parameters
        self.finish_update = self.masters.after_update
        self.routing = policy.routing
        self.routes = policy.routing is not None
        self.pack = policy.pack

    def routed_tokens(self, micro: MicroBatch) -> Tensor | None:
        return micro.routed_tokens()

    def logprobs(self, micro: MicroBatch, sampling: Sampling, *, of: Computed, routed_TLC: Tensor | None) -> Tensor:
        policy = self._policy
        with (
            torch.no_grad(),
            policy.injected.selection.use(TRAINER_SLOT if of == "policy" else None),
            device_work("a micro-batch of log-probs", policy.device.type),
        ):
            logprobs_R, _ = policy.logprobs(
                micro.packed, sampling=sampling, seen=micro.seen, routed_TLC=routed_TLC, directly=of == "base"
            )
        return logprobs_R

    def forward_backward(self, passes: Iterable[TrainingPass], sampling: Sampling, loss_of: LossOf) -> None:
        policy, teacher, selection = self._policy, self._teacher, self._policy.injected.selection
        for each in passes:
            micro = each.micro
            # Recomputed layers select the adapter again, so an engine in another thread waits for backward too.
            with selection.turn, device_work("a micro-batch of training", policy.device.type):
                outputs = teacher.outputs(micro, each.routed_TLC) if teacher and teacher.compares else None
                with selection.use(TRAINER_SLOT, dropout=each.dropout):
                    hidden_RN = policy.target_hidden(micro.packed, each.routed_TLC)
                    logprobs_R, entropy_R = policy.logprobs_of(
                        hidden_RN, micro.packed, sampling=sampling, seen=micro.seen
                    )
                    distances_R = None
                    if teacher is not None and outputs is not None:
                        distances_R = teacher.distances(hidden_RN, micro, outputs)
                loss_of(micro, logprobs_R, entropy_R, distances_R).backward()

    def finish_gradients(self) -> Tensor:
        return squared_norm(self.masters.parameters.values(), self.device).sqrt()

    def total(self, values: Mapping[str, float]) -> dict[str, float]:
        return dict(values)

    def largest(self, value: float) -> float:
        return value

    def collect(self, values_R: Tensor) -> Tensor:
        return values_R


HEAD = "value_head"


class ValueModel:
    """A critic: a second adapter around the layers of the policy's base, and a head over what they give.

    Initially predicts 0, because its head is 0. It uses no dropout, and its tokens go where the routers choose.

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
    """Like `Passes`: with several ranks, every rank calls every method, in the same order."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters of the value model that this process holds."""

    @property
    def owned(self) -> Mapping[str, nn.Parameter]:
        """The parameters that this process updates, and keeps moments of."""

    def values(self, micro: MicroBatch) -> Tensor:
        """fp32 `[R]` without gradient. A process without the last layer returns zeros."""

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss_of: ValueLossOf) -> None:
        """Adds the gradient of each micro-batch's loss. Processes without the last layer do not call `loss_of`."""

    def finish_gradients(self) -> Tensor:
        """Completes the gradients of `owned`; returns the norm of all parameters' gradients."""

    def finish_update(self) -> None:
        """Call after `owned` was updated."""


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


class Teacher:
    """A teacher on the policy's base. It uses no dropout, and its tokens go to the same experts as the policy's."""

    def __init__(self, policy: Policy, settings: TeacherSettings) -> None:
        """A previously trained adapter is already in its slot (`adapters.foreign.load_foreign`)."""
        self._policy = policy
        self._settings = settings
        self._slot = None if settings.type in ("Base", "Served") else TEACHER_SLOT
        self._masters: Masters | None = None
        if settings.type in ("Average", "Lagged"):
            self._masters = add_masters(policy.injected, TEACHER_SLOT, policy.injected.config, seed=0)
            self._blend(0.0)

    @property
    def compares(self) -> bool:
        """Whether training passes compare whole distributions."""
        return self._settings.measure is not None

    def outputs(self, micro: MicroBatch, routed_TLC: Tensor | None) -> Tensor | TeacherReport:
        """The teacher's view of the trained tokens: hidden states `[R, N]`, without gradient, or
        the servers' report.
        """
        if self._settings.type == "Served":
            return micro.teacher_report()
        with torch.no_grad(), self._policy.injected.selection.use(self._slot):
            return self._policy.target_hidden(micro.packed, routed_TLC)[micro.trained_R]

    def distances(self, hidden_RN: Tensor, micro: MicroBatch, outputs: Tensor | TeacherReport) -> Tensor:
        """fp32 `[R]`: distances of the policy from what `outputs` returned, with their gradient.

        Args: hidden_RN: the policy's, of all targets of the micro-batch that this process computes.
        """
        assert self._settings.measure is not None
        return self._policy.distances_of(hidden_RN, micro.packed, micro.trained_R, outputs, self._settings.measure)

    def logprobs(self, micro: MicroBatch, sampling: Sampling, routed_TLC: Tensor | None) -> Tensor:
        """fp32 `[R]` of the sampled tokens, as `sampling` draws them."""
        policy = self._policy
        with torch.no_grad(), policy.injected.selection.use(self._slot):
            all_R, _ = policy.logprobs(micro.packed, sampling=sampling, seen=micro.seen, routed_TLC=routed_TLC)
        return all_R[micro.trained_R]

    # --- teachers made from the policy ---

    def follow(self, steps: int) -> None:
        """Call after `steps` steps of the run: an average moves, a lagging teacher copies the policy when due."""
        if self._settings.type == "Average":
            assert self._settings.decay is not None
            self._blend(self._settings.decay)
        elif self._settings.type == "Lagged":
            assert self._settings.every_steps is not None
            if steps % self._settings.every_steps == 0:
                self._blend(0.0)

    def _blend(self, decay: float) -> None:
        """Averages OFT's parameters and builds the rotation from the average: a mean of rotations is not a rotation."""
        assert self._masters is not None
        own = self._policy.injected.masters.parameters
        with torch.no_grad():
            for name, parameter in self._masters.parameters.items():
                if decay:
                    parameter.lerp_(own[name], 1.0 - decay)
                else:
                    parameter.copy_(own[name])

    def state(self) -> TensorFile | None:
        """State for the checkpoint; None if the manifest determines the teacher completely."""
        return None if self._masters is None else build_state(self._masters.parameters, None, {"updates": 0})

    def restore(self, data: Buffer | None) -> None:
        """Args: data: None if the checkpoint has none; the teacher is then the restored policy."""
        if self._masters is None:
            return
        if data is None:
            self._blend(0.0)
        else:
            unpack_state(data, self._masters.parameters, None)
