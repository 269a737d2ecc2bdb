"""One rank of the Megatron trainer: what its process holds, and the calls that it answers.

Belongs here: a rank's part of the policy and of the optimiser, and reading and writing it. Does not belong here:
assembling parts (`outline`, `trainer`), starting processes (`workers`).
"""

from __future__ import annotations

import os
import socket
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.buffer import MappedPlace, Opening, opened, read_place
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.difference import explain_tensors
from orbit_runtime.adapters.expert_layer import AdaptedExpertLinear
from orbit_runtime.adapters.layer import TRAINER_SLOT, Applied
from orbit_runtime.algorithms.losses import policy_loss
from orbit_runtime.digests import Pieces
from orbit_runtime.errors import InternalError, ModelError
from orbit_runtime.policy.facts import PolicyFacts, describe
from orbit_runtime.policy.packed import Branch, PackedBatch
from orbit_runtime.policy.recompute import Recompute
from orbit_runtime.policy.snapshot import base_tensors, constants, record
from orbit_runtime.training.megatron.groups import Groups, Sizes, join, leave
from orbit_runtime.training.megatron.model import load_rank_policy
from orbit_runtime.training.megatron.outline import (
    Held,
    Outline,
    Runs,
    Spot,
    What,
    Window,
    cut_published,
    held_runs,
    outline_of,
    spans,
)
from orbit_runtime.training.megatron.passes import RankPasses
from orbit_runtime.training.megatron.sent import Sent, receive, send
from orbit_runtime.training.megatron.snapshots import RankSnapshot, held_points, rank_tensors
from orbit_runtime.training.settings import TrainerSettings
from orbit_runtime.training.state import MOMENTS
from orbit_runtime.training.teacher import Teacher
from orbit_runtime.training.updater import Updater
from orbit_runtime.types import Probe, Sample, UpdateResult
from orbit_runtime.workers.rank_notes import note

LISTENER_VARIABLE = "ORBIT_RENDEZVOUS_FD"
"""Set in rank 0 by the process that starts it: descriptor of a socket that already listens for the ranks."""


@dataclass(frozen=True)
class RankSettings:
    """The same for every rank; plain values, which are sent to its process."""

    folder: Path
    adapter: AdapterConfig
    sizes: Sizes
    trainer: TrainerSettings
    policy: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `load_policy`."""
    recompute: Recompute = "None"
    loss: Callable[..., Any] = policy_loss
    collective_seconds: float = 600.0
    """Maximum number of seconds that a collective waits for another rank."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a rank reports once it is ready."""

    outline: Outline
    policy: PolicyFacts
    sizes: Sizes


@dataclass(slots=True)
class Filled:
    """What a rank wrote of a window."""

    bytes: int = 0
    sent: list[tuple[int, np.ndarray[Any, Any]]] = field(default_factory=list)
    """Positions in the window and bytes of what it could not write itself: it is on another machine."""
    is_exact: bool = True
    """False if something that was applied has another size or is not representable in the file's dtype."""


@dataclass(frozen=True, slots=True)
class RankScore:
    """Log-probs of the tokens after the first, and what the passes multiplied by."""

    adapted: tuple[float, ...]
    base: tuple[float, ...]
    adapted_top: tuple[int, ...]
    """The most probable token at each position."""
    base_top: tuple[int, ...]
    applied: Mapping[str, tuple[Pieces, ...]]
    """`<module>.<kind>` of this rank's layers → pieces of each tensor of its part, one for each expert if each has its
    own in files; ranks that hold the same part must agree."""
    scalings: frozenset[float | None]


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
        taught = settings.trainer.teacher
        self._passes = RankPasses(held, self._groups, Teacher(self.policy, taught) if taught else None)
        self._updater = Updater(self._passes, settings.trainer, settings.loss)
        self._outline = outline_of(self.policy.injected)
        self._rotations: dict[str, Tensor] = {}
        self._applied: dict[str, tuple[Tensor, ...]] = {}
        """By parameter: the tensors themselves, one for each expert if each has its own in files."""
        self._scalings: dict[str, float | None] = {}
        """Scaling of the pass that `_applied` comes from, by module."""
        self._probing = ExitStack()
        self._runs: dict[tuple[str, bool, bool], Runs] = {}

    def facts(self) -> RankFacts:
        return RankFacts(self._outline, describe(self.policy), self._groups.sizes)

    # --- training ---

    def update(self, samples_D: Sequence[Sample]) -> UpdateResult:
        """Returns the same numbers on every rank."""
        note(step=self._updater.steps + 1)
        # Only for `explain`; the passes need the memory for what they round.
        self._applied = {}
        return self._updater.update(samples_D)

    def logprobs(self, samples_D: Sequence[Sample]) -> dict[int, array[float]]:
        """Columns of this replica's samples; one of its ranks returns them."""
        columns = self._updater.logprobs(samples_D)
        return columns if self._groups.leads and self._groups.tensor.rank() == 0 else {}

    def reference_logprobs(self, samples_D: Sequence[Sample]) -> dict[int, array[float]]:
        """Columns of this replica's samples; one of its ranks returns them."""
        columns = self._updater.reference_logprobs(samples_D)
        return columns if self._groups.leads and self._groups.tensor.rank() == 0 else {}

    def score(self, token_ids_T: Sequence[int]) -> RankScore:
        """Every replica scores the same tokens: with the masters rounded as for publishing, and with the bare base."""
        first, rest = tuple(token_ids_T[:1]), tuple(token_ids_T[1:])
        policy, self._applied = self.policy, {}
        batch = policy.pack([Branch(0, first, rest)])
        with torch.no_grad():
            with policy.injected.selection.use(TRAINER_SLOT), policy.traced() as trace:
                adapted, adapted_top = self._scores(batch)
            with policy.injected.selection.use(None):
                base, base_top = self._scores(batch)
        self._applied = self._keep(trace)
        self._scalings = {entry.module: entry.scaling for entry in trace}
        parts = applied_pieces(self._applied)
        scalings = frozenset(entry.scaling for entry in trace)
        return RankScore(
            tuple(adapted.tolist()),
            tuple(base.tolist()),
            tuple(adapted_top.tolist()),
            tuple(base_top.tolist()),
            parts,
            scalings,
        )

    def _scores(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Results of the last stage; the other stages have none."""
        if self._groups.is_last_stage:
            return self.policy.scores(batch)
        self.policy.through(batch)
        return torch.empty(0), torch.empty(0, dtype=torch.long)

    def _keep(self, trace: Sequence[Applied]) -> dict[str, tuple[Tensor, ...]]:
        applied: dict[str, tuple[Tensor, ...]] = {}
        for entry in trace:
            layer = self.policy.injected.layers[entry.module]
            for kind in layer.shapes():
                names = layer.held_names(kind) if isinstance(layer, AdaptedExpertLinear) else layer.file_names(kind)
                tensors = tuple(entry.tensors[name].detach() for name in names)
                before = applied.setdefault(f"{entry.module}.{kind}", tensors)
                # Comparing a tensor with itself reads all of it.
                if before is not tensors and not all(map(torch.equal, before, tensors)):
                    raise InternalError(f"one pass applied two different values of {entry.module}.{kind}")
        return applied

    def explain(self, values: Mapping[str, Sent], scaling: float | None) -> list[str]:
        """How the values that the newest `score` applied here differ from the published ones, one sentence per
        parameter.

        Args:
            values: whole published parameters of one layer: LoRA factors or OFT rotations.
            scaling: factor of the LoRA product.
        """
        published, told = {}, []
        for key, whole in receive(values).items():
            held = self._outline.get(key)
            if held is None:
                continue
            if key not in self._applied:
                told.append(f"{key} was not applied")
                continue
            published[key] = cut_published(held.place, whole, self._masters.config)
            used = self._scalings[key.rpartition(".")[0]]
            if used != scaling:
                told.append(f"{key} was scaled by {used}, published was {scaling}")
        applied = {key: self._applied[key] for key in published}
        joined = {key: each[0] if len(each) == 1 else torch.stack(each) for key, each in applied.items()}
        return told + explain_tensors(published, {key: each.cpu() for key, each in joined.items()})

    def begin_probing(self, probe: Probe, seed: int) -> None:
        """From now on the masters hold an untrained probe adapter."""
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

    def base_values(self, holders: Mapping[str, Sequence[int]]) -> dict[str, Sent]:
        """This rank's parts, in fp32, of the base tensors that it is to provide."""
        rank = distributed.get_rank()
        wanted = {name for name, ranks in holders.items() if rank in ranks}
        return send({name: read().float() for name, read in base_tensors(self.policy.model) if name in wanted})

    # --- reading and writing ---

    def prepare_publish(self) -> None:
        """OFT: from now on `rotations` are computed from the masters' current values."""
        if self._masters.config.type == "OFT":
            with torch.no_grad():
                built = self._masters.rotations()
            self._rotations = {f"{name}.oft_R": value.to(torch.bfloat16) for name, value in built.items()}

    def fill(self, window: Window, dtype: torch.dtype, opening: Opening, start: int) -> Filled:
        """Writes this rank's parts of a file into memory that all ranks of a machine share.

        A part that several ranks hold is written by one of them.

        Args:
            dtype: of the file.
            opening: the memory.
            start: position in it of the window's first byte.

        Raises:
            OutOfMemoryError: the machine has no memory left for it.
        """
        filled, place = Filled(), None
        with ExitStack() as stack:
            # On another machine than the run's process there is no such memory.
            with suppress(OSError):
                place = MappedPlace(stack.enter_context(opened(opening, os.O_RDWR)), start, window.size)
            for spot, position, own in self._spans(window, dtype.itemsize, filled, told=True):
                if spot.what == "applied" and not torch.equal(own.to(dtype).to(own.dtype), own):
                    filled.is_exact = False
                size = own.numel() * dtype.itemsize
                filled.bytes += size
                if place is None:
                    filled.sent.append((position, own.to(dtype).cpu().contiguous().view(torch.uint8).numpy()))
                else:
                    # Rounded where it is to lie.
                    torch.frombuffer(place.view(position, position + size), dtype=dtype).copy_(own)
        return filled

    def take(self, window: Window, opening: Opening, start: int, data: bytes | None) -> bool:
        """Copies this rank's parts of a state's file into masters and moments.

        Args:
            opening: the memory that all ranks of a machine share.
            start: position in it of the window's first byte.
            data: the window's bytes, for ranks on other machines.

        Returns:
            Whether the bytes could be read.
        """
        with torch.no_grad(), ExitStack() as stack:
            if data is None:
                try:
                    descriptor = stack.enter_context(opened(opening, os.O_RDONLY))
                except OSError:
                    return False
                data = read_place(descriptor, start, window.size)
            given = torch.frombuffer(data if isinstance(data, memoryview) else bytearray(data), dtype=torch.float32)
            for spot in window.spots:
                if spot.what in MOMENTS and self._owns(spot.key):
                    master = self._masters.parameters[spot.key]
                    moments = self._updater.optimizer.state[master]
                    if spot.what not in moments:
                        moments[spot.what] = torch.empty_like(master)
            for _, position, own in self._spans(window, given.element_size(), Filled(), told=False):
                first = position // given.element_size()
                own.copy_(given[first : first + own.numel()])
        return True

    def _spans(self, window: Window, size: int, filled: Filled, *, told: bool) -> Iterator[tuple[Spot, int, Tensor]]:
        """Views of this rank's values that lie in the window, each with its entry and its first byte there.

        Args:
            size: bytes of a value in the file.
            told: leave out values that another rank writes.
        """
        end = window.size
        for spot in window.spots:
            held = self._outline.get(spot.key)
            if held is None or ((told or spot.what in MOMENTS) and not self._owns(spot.key)):
                continue
            runs, own = self._find_runs(spot, held), self._value(spot.what, spot.key)
            if runs.rows is not None:
                if spot.index not in runs.rows:
                    continue
                own = own[runs.rows.index(spot.index)]
            elif isinstance(own, tuple):
                own = own[0]
            if own.numel() == runs.num_values:
                for position, span in spans(runs, own.detach(), spot.position, end, size):
                    yield spot, position, span
            else:
                filled.is_exact = False

    def _find_runs(self, spot: Spot, held: Held) -> Runs:
        # Rotations have another shape than their parameters.
        kind = (spot.key, spot.what in ("rotations", "applied"), spot.index is not None)
        if kind not in self._runs:
            self._runs[kind] = held_runs(spot.what, held, self._masters.config, by_row=spot.index is not None)
        return self._runs[kind]

    def _value(self, what: What, key: str) -> Tensor | tuple[Tensor, ...]:
        if what == "rotations":
            return self._rotations[key]
        if what == "applied":
            return self._applied[key]
        master = self._masters.parameters[key]
        return master if what in ("master", "lora") else self._updater.optimizer.state[master][what]  # type: ignore[no-any-return]

    def _owns(self, key: str) -> bool:
        """Whether this rank updates the master of this parameter. It writes its values, and has its moments."""
        held = self._outline.get(key)
        return held is not None and f"{held.owner}.{held.place.kind}" in self._passes.owned

    def counters(self) -> dict[str, int]:
        return self._updater.counters

    def set_counters(self, counters: Mapping[str, int]) -> None:
        self._updater.updates, self._updater.steps = counters["updates"], counters["steps"]
        if not self._updater.updates:
            self._updater.optimizer.state.clear()
        for moments in self._updater.optimizer.state.values():
            moments["step"] = torch.tensor(float(self._updater.updates), dtype=torch.float32)

    def base_digest(self) -> str:
        """Digest of this rank's part of the base."""
        return self.policy.base_digest()

    def close(self) -> None:
        """Safe to call twice."""
        leave()


def applied_pieces(applied: Mapping[str, Sequence[Tensor]]) -> dict[str, tuple[Pieces, ...]]:
    """Pieces of each parameter's tensors."""
    found = tensorfile.tensor_pieces(((key, index), each) for key in applied for index, each in enumerate(applied[key]))
    return {key: tuple(found[key, index] for index in range(len(tensors))) for key, tensors in applied.items()}


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
