"""The torch trainer: a whole policy in this process, which the torch engine may share."""

from __future__ import annotations

from array import array
from collections.abc import Buffer, Callable, Mapping, Sequence
from typing import Any

import torch

from orbit_runtime.adapters.files import published_scaling
from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.adapters.state import (
    applied_digest,
    explain_tensors,
    join_differences,
    published_tensors,
    write_adapter,
)
from orbit_runtime.algorithms.losses import policy_loss
from orbit_runtime.errors import InternalError
from orbit_runtime.policy.model import Policy
from orbit_runtime.policy.packed import Branch
from orbit_runtime.policy.whole import WholeMasters, write_model
from orbit_runtime.training.critic import Critic
from orbit_runtime.training.passes import LocalPasses, LocalValues, Teacher, ValueModel
from orbit_runtime.training.settings import TrainerSettings
from orbit_runtime.training.state import CRITIC_PART, PART, TEACHER_PART, build_state, unpack_state
from orbit_runtime.training.updater import Updater
from orbit_runtime.types import AdapterManifest, AdapterSink, Computed, Sample, Scored, StateWriter


class TorchTrainer:
    """A `Trainer` in this process, on the policy that the torch engine shares.

    Where the whole of a model trains (`policy.whole`), it publishes the model itself, and there is no base to compare
    with.
    """

    def __init__(self, policy: Policy, settings: TrainerSettings, loss: Callable[..., Any] = policy_loss) -> None:
        self._policy = policy
        self._settings = settings
        critic = None
        if settings.critic:
            valued = LocalValues(ValueModel(policy, settings.seed, settings.critic.rank))
            critic = Critic(valued, settings, settings.critic)
        teacher = Teacher(policy, settings.teacher) if settings.teacher else None
        passes = LocalPasses(policy, teacher)
        self._masters = passes.masters
        self._updater = Updater(passes, settings, loss, critic, teacher)
        self.update, self.take_rates = self._updater.update, self._updater.take_rates

    def column(self, name: Computed, samples_D: Sequence[Sample]) -> list[array[float]]:
        if self._policy.whole and name != "policy":
            raise InternalError("a model that trains as a whole keeps no base to compare with")
        columns = self._updater.column(name, samples_D)
        return [columns[index] for index in range(len(samples_D))]

    # --- publishing and proof ---

    def publish(self, sink: AdapterSink) -> AdapterManifest:
        if isinstance(self._masters, WholeMasters):
            return write_model(self._masters, sink)
        injected = self._policy.injected
        return write_adapter(injected, injected.config, self._settings.base_model, sink)

    def score(self, token_ids_T: Sequence[int]) -> tuple[Scored, Scored]:
        """Scores the sequence in two packed passes: with the masters' published rounding, and with the bare base.

        Both results of a whole model are its own.
        """
        return self.score_together([token_ids_T])[0]

    def score_together(self, sequences: Sequence[Sequence[int]]) -> list[tuple[Scored, Scored]]:
        """`score` of several sequences in one pass."""
        is_whole, count = bool(self._policy.whole), len(sequences)
        given = sequences if is_whole else [*sequences, *sequences]
        batch = self._policy.pack([Branch(at, tuple(each[:1]), tuple(each[1:])) for at, each in enumerate(given)])
        middle = len(batch.token_ids_T) // 2
        segments = None if is_whole else [(TRAINER_SLOT, 0, middle), (None, middle, 2 * middle)]
        with torch.no_grad(), self._policy.injected.selection.use(segments), self._policy.traced() as trace:
            logprobs, top = self._policy.scores(batch)
        applied = None if is_whole else applied_digest(trace)
        lengths = [len(each) - 1 for each in given]
        found = [
            Scored((0.0, *some.tolist()), applied if at < count else None, top_T=(-1, *most.tolist()))
            for at, (some, most) in enumerate(zip(logprobs.split(lengths), top.split(lengths), strict=True))
        ]
        return list(zip(found[:count], found[-count:], strict=True))

    def explain(self, files: Mapping[str, Buffer]) -> str:
        """A description of how a pass's applied values differ from the published ones; empty if they do not."""
        batch = self._policy.pack([Branch(0, (0,), (0,))])
        with torch.no_grad(), self._policy.injected.selection.use(TRAINER_SLOT), self._policy.traced() as trace:
            self._policy.scores(batch)
        applied = {name: tensor for entry in trace for name, tensor in entry.tensors.items()}
        published, scaling = published_tensors(files), published_scaling(files)
        told = [
            f"{entry.module} was scaled by {entry.scaling}, published was {scaling}"
            for entry in trace
            if entry.scaling != scaling
        ]
        return join_differences(told + explain_tensors(published, applied), len(published))

    # --- checkpoint ---

    def save_state(self, writer: StateWriter) -> None:
        self._updater.let_be_read()
        file = build_state(self._masters.parameters, self._updater.optimizer, self._updater.counters)
        writer.write(PART, file.size, file.pieces)
        critic = self._updater.critic
        if critic is not None:
            held = build_state(critic.parameters, critic.optimizer, {"updates": critic.updates})
            writer.write(CRITIC_PART, held.size, held.pieces)
        taught = self._updater.teacher.state() if self._updater.teacher else None
        if taught is not None:
            writer.write(TEACHER_PART, taught.size, taught.pieces)
        self._updater.reader = writer

    def load_state(self, parts: Mapping[str, Buffer]) -> None:
        self._updater.let_be_read()
        counters = unpack_state(parts[PART], self._masters.parameters, self._updater.optimizer)
        self._updater.updates, self._updater.steps = counters["updates"], counters["steps"]
        critic = self._updater.critic
        # A run that starts from another run's adapter may have a critic although that run had none.
        if critic is not None and CRITIC_PART in parts:
            critic.updates = unpack_state(parts[CRITIC_PART], critic.parameters, critic.optimizer)["updates"]
        if self._updater.teacher is not None:
            self._updater.teacher.restore(parts.get(TEACHER_PART))
        if self._policy.whole:
            self._masters.after_update()
