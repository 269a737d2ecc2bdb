"""One rank of the Megatron trainer: what its process holds, and the calls that it answers.

Belongs here: a rank's part of the policy and of the optimiser, and reading and writing it. Does not belong here:
assembling parts (`outline`, `trainer`), starting processes (`workers`).
"""

from __future__ import annotations

import os
import socket
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.buffer import MemoryOpening
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.adapters.part import WHOLE
from orbit_runtime.adapters.rotations import RotationCache
from orbit_runtime.adapters.state import AppliedHashes, AppliedPieces, explain_tensors
from orbit_runtime.algorithms.losses import policy_loss
from orbit_runtime.digests import Pieces, cut, hash_pieces
from orbit_runtime.errors import ModelError
from orbit_runtime.policy.facts import PolicyFacts, describe
from orbit_runtime.policy.load import PolicySettings
from orbit_runtime.policy.packed import Branch, PackedBatch
from orbit_runtime.policy.recompute import Recompute
from orbit_runtime.policy.snapshot import base_tensors, constants, record
from orbit_runtime.training.critic import Critic
from orbit_runtime.training.megatron.groups import Groups, GroupSizes, join, leave
from orbit_runtime.training.megatron.model import RankPolicy, load_rank_policy
from orbit_runtime.training.megatron.outline import (
    FileWindow,
    HeldParameter,
    Holder,
    Outline,
    What,
    cut_published,
    outline_of,
)
from orbit_runtime.training.megatron.packed_tensors import PackedTensor, receive, send
from orbit_runtime.training.megatron.passes import RankPasses, RankValues
from orbit_runtime.training.megatron.rank_parameters import RankParameters, WindowResult
from orbit_runtime.training.megatron.snapshots import RankSnapshot, held_points, rank_tensors
from orbit_runtime.training.passes import HEAD, Teacher, ValueModel
from orbit_runtime.training.settings import CriticSettings, TrainerSettings
from orbit_runtime.training.updater import Updater
from orbit_runtime.types import Computed, Probe, Sample, UpdateResult
from orbit_runtime.workers.ranks.rank import note

LISTENER_VARIABLE = "ORBIT_RENDEZVOUS_FD"
"""Set in rank 0 by the process that starts it: descriptor of a socket that already listens for the ranks."""


@dataclass(frozen=True)
class RankSettings:
    """The same for every rank; plain values, which are sent to its process."""

    folder: Path
    adapter: AdapterConfig
    sizes: GroupSizes
    trainer: TrainerSettings
    policy: PolicySettings = field(default_factory=PolicySettings)
    recompute: Recompute = "None"
    loss: Callable[..., Any] = policy_loss
    collective_seconds: float = 600.0
    """Maximum number of seconds that a collective waits for another rank."""


@dataclass(frozen=True, slots=True)
class TrainerRankFacts:
    """Reported by a rank once it is ready."""

    outline: Outline
    policy: PolicyFacts
    sizes: GroupSizes
    critic: Outline
    """The critic's parameters; empty without a critic."""


@dataclass(frozen=True, slots=True)
class RankScore:
    """Log-probs of the tokens after the first, and what the passes multiplied by."""

    adapted: tuple[float, ...]
    base: tuple[float, ...]
    adapted_top: tuple[int, ...]
    """The most probable token at each position."""
    base_top: tuple[int, ...]
    applied: AppliedPieces
    """Pieces of this rank's part; ranks that hold the same part must agree."""
    scalings: frozenset[float | None]
    critic: Mapping[str, Pieces]
    """The critic's parameters that other ranks hold too → pieces of this rank's values; empty without a critic."""


class MegatronRank:
    """Every rank gets the same calls in the same order; each call is a collective."""

    def __init__(self, settings: RankSettings, groups: Groups | None = None) -> None:
        """Meets the other ranks and loads this rank's part.

        Args:
            groups: the groups of this process; None to create them from `RANK`, `MASTER_ADDR` and `MASTER_PORT`.

        Raises:
            UnsupportedError: this model cannot be divided this way.
            ModelError: the model's files are not on this node.
        """
        if not settings.folder.is_dir():
            raise ModelError(
                f"node {socket.gethostname()} has no {settings.folder}: every rank reads its part of the model's files",
                where="spec.placement.modelCache.claimName",
                fix="name a claim that every node mounts; without a cluster set ORBIT_CACHE to a folder that all see",
            )
        self._settings = settings
        self._groups = groups if groups is not None else join_by_environment(settings)
        held = load_rank_policy(settings.folder, settings.adapter, self._groups, **settings.policy)
        self.policy = held.policy
        self.policy.recompute(settings.recompute)
        self._masters = self.policy.injected.masters
        trainer, self._holdings = settings.trainer, dict[Holder, RankParameters]()
        teacher = Teacher(self.policy, trainer.teacher) if trainer.teacher else None
        self._passes = RankPasses(held, self._groups, teacher)
        critic = None
        self._copied_of_critic: Mapping[str, Tensor] = {}
        if trainer.critic:
            critic, self._holdings["critic"], self._copied_of_critic = build_critic(
                held, self._groups, trainer, trainer.critic
            )
        self._updater = Updater(self._passes, trainer, settings.loss, critic)
        self._outline = outline_of(self.policy.injected, self._masters)
        self._holdings["policy"] = RankParameters(
            self._outline,
            self._masters.config,
            self._masters.parameters,
            self._passes.owned,
            self._updater.optimizer,
        )
        self._holdings["policy"].built = self._built
        self._applied: AppliedPieces = {}
        self._scalings: Mapping[str, set[float | None]] = {}
        """Module → scalings that the newest `score` applied."""
        self._newest = RotationCache()
        self._probing = ExitStack()

    def facts(self) -> TrainerRankFacts:
        critic = self._holdings["critic"].outline if "critic" in self._holdings else {}
        return TrainerRankFacts(self._outline, describe(self.policy), self._groups.sizes, critic)

    # --- training ---

    def update(self, samples_D: Sequence[Sample]) -> UpdateResult:
        """Returns the same numbers on every rank."""
        note(step=self._updater.steps + 1)
        return self._updater.update(samples_D)

    def column(self, name: Computed, samples_D: Sequence[Sample]) -> dict[int, array[float]]:
        """Column `name` of this replica's samples, by their index; one of its ranks returns it."""
        columns = self._updater.column(name, samples_D)
        return columns if self._groups.leads and self._groups.tensor.rank() == 0 else {}

    def score(self, token_ids_T: Sequence[int]) -> RankScore:
        """Every replica scores the same tokens: with the masters rounded as for publishing, and with the bare base."""
        first, rest = tuple(token_ids_T[:1]), tuple(token_ids_T[1:])
        policy, hashes = self.policy, AppliedHashes(self.policy.injected.layers)
        batch = policy.pack([Branch(0, first, rest)])
        with torch.no_grad():
            with policy.injected.selection.use(TRAINER_SLOT, by_layer=True), policy.traced(hashes.add):
                adapted, adapted_top = self._scores(batch)
            with policy.injected.selection.use(None):
                base, base_top = self._scores(batch)
        self._applied, self._scalings, self._newest = hashes.result(), hashes.scalings, RotationCache()
        return RankScore(
            tuple(adapted.tolist()),
            tuple(base.tolist()),
            tuple(adapted_top.tolist()),
            tuple(base_top.tolist()),
            self._applied,
            frozenset().union(*self._scalings.values()),
            {name: hash_pieces(cut(_host_bytes(each))) for name, each in self._copied_of_critic.items()},
        )

    def _scores(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Results of the last stage; the other stages have none."""
        if self._groups.is_last_stage:
            return self.policy.scores(batch)
        self.policy.through(batch)
        return torch.empty(0), torch.empty(0, dtype=torch.long)

    def _built(self, what: What, key: str, row: int | None) -> Tensor | None:
        """See `RankParameters.built`. Nothing that was applied is kept: it is built again, and its hash shows whether
        it has the values that the newest `score` multiplied by.
        """
        module, _, kind = key.rpartition(".")
        experts = WHOLE if row is None else slice(row, row + 1)
        build, layer = self.policy.injected.selection.applied_masters[TRAINER_SLOT], self.policy.injected.layers[module]
        with torch.no_grad():
            if what == "rotations":
                R = self._masters.rotations.of(module, experts, self._newest)
                return (R if row is None else R[0]).to(torch.bfloat16)
            values = build(module, experts, self._newest)[module].tensors()[kind]
        parts = values.unbind() if len(layer.held_names(kind)) > 1 else (values,)
        pieces = tensorfile.tensor_pieces(enumerate(parts))
        if self._applied.get(key, ())[experts] != tuple(pieces.values()):
            return None
        return values if row is None else values[0]

    def explain(self, values: Mapping[str, PackedTensor], scaling: float | None) -> list[str]:
        """Differences between the values that the newest `score` applied here and the published ones, one sentence per
        parameter.

        Args:
            values: whole published parameters of one layer: LoRA factors or OFT rotations.
            scaling: factor of the LoRA product.
        """
        published, applied, differing = {}, {}, list[str]()
        for key, whole in receive(values).items():
            held = self._outline.get(key)
            if held is None:
                continue
            if key not in self._applied:
                differing.append(f"{key} was not applied")
                continue
            again = self._built("applied", key, None)
            if again is None:
                differing.append(f"{key} was applied with other values than are built from its masters now")
            else:
                published[key] = cut_published(held.place, whole, self._masters.config)
                applied[key] = again.cpu()
            for used in self._scalings[key.rpartition(".")[0]] - {scaling}:
                differing.append(f"{key} was scaled by {used}, published was {scaling}")
        return differing + explain_tensors(published, applied)

    def begin_probing(self, probe: Probe, seed: int) -> None:
        """Replaces the masters' values by those of an untrained probe adapter."""
        self._probing.enter_context(self._masters.probing(probe, seed))

    def end_probing(self) -> None:
        """Restores the masters' own values, bit for bit."""
        self._probing.close()

    def snapshot(
        self, token_ids_T: Sequence[int], adapter: bool, copies: int, routed_TLC: np.ndarray | None
    ) -> RankSnapshot:
        """Snapshot of one pass that every replica computes; only the points if there are several copies."""
        slot = TRAINER_SLOT if adapter else None
        own_TLC = self._passes.own_layers(routed_TLC)
        points, preferred = record(self.policy, token_ids_T, slot, copies=copies, routed_TLC=own_TLC)
        points = held_points(points, self._groups.share())
        if copies > 1:
            return RankSnapshot(send(points), None, {}, {})
        tensors = rank_tensors(self.policy, self._groups.share(), distributed.get_rank())
        return RankSnapshot(send(points), preferred, tensors, send(constants(self.policy, len(token_ids_T) - 1)))

    def base_values(self, holders: Mapping[str, Sequence[int]]) -> dict[str, PackedTensor]:
        """This rank's parts, in fp32, of the base tensors that it is to provide."""
        rank = distributed.get_rank()
        wanted = {name for name, ranks in holders.items() if rank in ranks}
        return send({name: read().float() for name, read in base_tensors(self.policy.model) if name in wanted})

    # --- reading and writing ---

    def prepare_publish(self) -> None:
        """OFT: from now on rotations are built from the masters' current values."""
        self._newest = RotationCache()

    def fill(self, window: FileWindow, dtype: torch.dtype, opening: MemoryOpening, start: int) -> WindowResult:
        """See `RankParameters.fill`."""
        return self._holdings[window.holder].fill(window, dtype, opening, start)

    def take(self, window: FileWindow, opening: MemoryOpening, start: int, data: bytes | None) -> bool:
        """See `RankParameters.take`."""
        return self._holdings[window.holder].take(window, opening, start, data)

    def counters(self, holder: Holder) -> dict[str, int]:
        critic = self._updater.critic
        if holder == "policy":
            return self._updater.counters
        assert critic is not None
        return {"updates": critic.updates}

    def set_counters(self, holder: Holder, counters: Mapping[str, int]) -> None:
        critic = self._updater.critic
        if holder == "policy":
            self._updater.updates, self._updater.steps = counters["updates"], counters["steps"]
        else:
            assert critic is not None
            critic.updates = counters["updates"]
        self._holdings[holder].restored(counters["updates"])

    def base_digest(self) -> str:
        """Digest of this rank's part of the base."""
        return self.policy.base_digest()

    def close(self) -> None:
        """Safe to call twice."""
        leave()


def build_critic(
    held: RankPolicy, groups: Groups, settings: TrainerSettings, critic: CriticSettings
) -> tuple[Critic, RankParameters, Mapping[str, Tensor]]:
    """A critic around this rank's part of the policy, with its head on the last stage; and its parameters that other
    ranks hold too."""
    valued = ValueModel(held.policy, settings.seed, critic.rank, has_head=groups.is_last_stage)
    passes, adapter = RankValues(held, groups, valued), valued.adapter
    made = Critic(passes, settings, critic)
    head = valued.places.keys() - adapter.places.keys()
    outline = outline_of(held.policy.injected, adapter) | {
        name: HeldParameter(valued.places[name], HEAD, (name,)) for name in head
    }
    holding = RankParameters(outline, adapter.config, valued.parameters, made.owned, made.optimizer)
    return made, holding, passes.copied


def _host_bytes(values: Tensor) -> memoryview:
    return memoryview(values.detach().cpu().contiguous().view(torch.uint8).numpy()).cast("B")


def join_by_environment(settings: RankSettings) -> Groups:
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    listener = os.environ.pop(LISTENER_VARIABLE, None)
    return join(
        settings.sizes,
        int(os.environ["RANK"]),
        address,
        seconds=settings.collective_seconds,
        listener=int(listener) if listener else None,
    )
