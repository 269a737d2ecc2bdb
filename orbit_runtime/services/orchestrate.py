"""Trainer and inference processes as the two sides of a run: connected, checked against each other, and opened.

Belongs here: the handshake. Does not belong here: a connection (`connection`), the loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import TypeAdapter

from orbit_runtime.errors import ModelError, UsageError
from orbit_runtime.model_info.content import cached_weights_digest
from orbit_runtime.planner.support.manifests import check_apart
from orbit_runtime.planner.support.served import check_served
from orbit_runtime.policy.facts import PolicyFacts
from orbit_runtime.rollout.served_engine import ServedEngine, start_engine
from orbit_runtime.services.connection import Connection
from orbit_runtime.services.remote_engine import RemoteEngine
from orbit_runtime.services.remote_servers import RemoteMailbox, RemoteServer
from orbit_runtime.services.remote_trainer import RemoteTrainer
from orbit_runtime.services.shared_store import sweep, try_to_share
from orbit_runtime.sides.engines import build_servers, place_of, routed_layers
from orbit_runtime.sides.interface import EngineOrder, TrainerOrder, TrainerSide
from orbit_runtime.sides.teacher import CONTENT, teacher_digest
from orbit_runtime.sides.trainers import decide_by_size
from orbit_runtime.spec import MachineFacts, Resolved, identity_fields
from orbit_runtime.spec.resolve import with_trainer
from orbit_runtime.storage import Execution, Store
from orbit_runtime.storage.cache import Cache, default_cache
from orbit_runtime.types import Engine
from orbit_runtime.workers.child.signals import StopFlag

EQUAL = ("threads", "torch", "instructions")
"""Facts of `rounding`: if two processes differ in them, their passes round differently."""

RATE = "spec.training.learningRate"


class RemoteSides:
    """`Sides` over two connections."""

    loads_beside = False
    in_place = True
    starts_engine = False

    def __init__(self, trainer: Connection, inference: Connection | None) -> None:
        """Asks both processes what they are, before a run claims its folder.

        Args:
            inference: None if there is no such process; see `side_manifest.kinds_of`.

        Raises:
            OrbitError: one is unreachable, or they do not belong together.
        """
        self._trainer = trainer
        self._inference = inference
        facts = trainer.facts()
        if inference is not None and (other := inference.facts())["engine"] == "Torch":
            check_pair(facts, other)
        self._machine = MachineFacts(bool(facts["has_cuda"]), int(facts["num_gpus"]))

    def watch(self, stop: StopFlag, note: Callable[[str], None], store: Store, execution: Execution) -> None:
        self._store, self._execution = store, execution
        self._share = partial(try_to_share, store=store, execution=execution.number)
        for each in self._lines:
            each.note = note
            each.is_stopped = lambda: bool(stop)

    def machine(self, stage: Callable[[str], None]) -> MachineFacts:
        return self._machine

    def check(self, resolved: Resolved) -> None:
        """Each process has checked its own installation."""

    def load_loss(
        self, resolved: Resolved, search_path: Callable[[], Sequence[str]], given: Callable[..., Any] | None
    ) -> None:
        """The trainer's process has loaded the manifest's."""

    def settle(self, resolved: Resolved, folder: Path, longest_prompt: Callable[[], int] | None = None) -> Resolved:
        return decide_by_size(with_trainer(resolved, "Torch"), folder)

    def start_engine(self, order: EngineOrder) -> None:
        """Its process has started it."""

    def open(self, order: TrainerOrder) -> TrainerSide:
        resolved, closing, store, execution = order.resolved, order.closing, self._store, self._execution
        check_apart(resolved.run.spec)
        for line in self._lines:
            check_manifest(line.facts(), identity_fields(resolved.run), order)
        if self._inference is not None:
            weights = cached_weights_digest(order.folder, Cache(default_cache(os.environ)))
            check_inference(self._inference.facts(), resolved.engine, weights)
        for line in self._lines:
            closing.callback(line.close)
            line.open(store.uri, execution.number)
        scratch = Path(closing.enter_context(TemporaryDirectory(prefix="orbit-orchestrator-")))
        sweep(store)
        trainer, spec = self._trainer.facts(), resolved.run.spec
        rate, critic = spec.training.decided_rate, spec.algorithm.decided_critic
        rates = None if trainer["identity"][RATE] == rate else (rate, (critic and critic.learning_rate) or rate)
        remote = RemoteTrainer(self._trainer, store, execution, self._share, scratch, rates)
        closing.callback(remote.tidy)
        return TrainerSide(
            remote,
            TypeAdapter(PolicyFacts).validate_python(trainer["policy"]),
            begin=remote.begin,
            base_digest=remote.base_digest,
            probing=remote.probing,
            snapshot=None,
            policy=None,
            rounding=dict(trainer["rounding"]),
            gives_same_bits=lambda: all(line.facts().get("gives_same_bits", False) for line in self._lines),
            explain=remote.explain,
        )

    @property
    def _lines(self) -> tuple[Connection, ...]:
        return (self._trainer,) if self._inference is None else (self._trainer, self._inference)

    def build_engine(self, order: EngineOrder, facts: PolicyFacts) -> Engine:
        if order.settings.rollout.engine == "OpenAI":
            return build_servers(order, facts)
        assert self._inference is not None
        if order.settings.rollout.engine == "SGLang":
            return _start_remote(self._inference, RemoteMailbox(self._inference, self._share), order, facts)
        return RemoteEngine(self._inference, self._share)


def _start_remote(inference: Connection, desk: RemoteMailbox, order: EngineOrder, facts: PolicyFacts) -> ServedEngine:
    rollout = order.settings.rollout
    check_served(facts.served(place_of(order.settings)))
    routed = routed_layers(facts) if rollout.router_replay != "None" else None
    servers = [
        RemoteServer(inference, index, deterministic=rollout.deterministic, routed=routed)
        for index in range(int(inference.facts()["servers"]))
    ]
    return start_engine(servers, order.tokenizer, desk=desk, max_running_requests=rollout.max_running_requests)


def check_pair(trainer: Mapping[str, Any], inference: Mapping[str, Any]) -> None:
    """Checks that two processes that both compute with torch can work together.

    Raises:
        ModelError: (66) the two hold different bases.
        UsageError: (64) they compute with different numbers of threads, or different versions of torch.
    """
    if trainer["base_digest"] != inference["base_digest"]:
        raise ModelError(
            f"trainer and inference hold different bases: {str(trainer['base_digest'])[:19]}… and "
            f"{str(inference['base_digest'])[:19]}…",
            where="spec.model.uri",
            fix="give both the same model files",
        )
    for name in EQUAL:
        one, other = trainer["rounding"].get(name), inference["rounding"].get(name)
        if one != other:
            raise UsageError(
                f"trainer and inference round differently: {name} {one} and {other}",
                where=f"rounding.{name}",
                fix="start both with the same OMP_NUM_THREADS"
                if name == "threads"
                else "use the same torch and the same kind of processor for both",
            )


def check_inference(facts: Mapping[str, Any], engine: str, weights: str) -> None:
    """
    Raises:
        UsageError: (64) it was started with another engine.
        ModelError: (66) its servers hold another model.
    """
    if facts["engine"] != engine:
        raise UsageError(
            f"the inference process was started with engine {facts['engine']}, this run's is {engine}",
            where="spec.rollout.engine",
            fix="start all three with the same manifest",
        )
    if engine == "SGLang" and facts["base_digest"] != weights:
        raise ModelError(
            f"the inference process serves other weights: {facts['base_digest'][:19]}… there, {weights[:19]}… here",
            where="spec.model.uri",
            fix="give all processes the same model files",
        )


def check_manifest(facts: Mapping[str, Any], identity: Mapping[str, Any], order: TrainerOrder) -> None:
    """
    Raises:
        UsageError: (64) the process was started with another manifest.
        ModelError: (66) it read another teacher.
    """
    theirs, kind = facts["identity"], facts["kind"]
    # A run of an earlier version began with another rate where no manifest has one; its trainer is told.
    is_open = facts["decides_rate"] and order.resolved.asked.spec.training.learning_rate is None
    paths = {*theirs, *identity} - {RATE if is_open else ""}
    differing = sorted(path for path in paths if theirs.get(path) != identity.get(path))
    if differing:
        lines = "".join(f"\n  {path}: {theirs.get(path)!r} there, {identity.get(path)!r} here" for path in differing)
        raise UsageError(
            f"the {kind} was started with another manifest:{lines}", fix="start all three with the same manifest"
        )
    if facts["model"] != order.model:
        raise UsageError(
            f"the {kind} calls the model {facts['model']!r}, this run calls it {order.model!r}",
            where="spec.model.uri",
            fix="write the address that the run began with for all three",
        )
    teacher = teacher_digest(order.teacher).get(CONTENT)
    if facts["teacher"] != teacher:
        raise ModelError(
            f"the {kind} read another teacher: {str(facts['teacher'])[:19]}… there, {str(teacher)[:19]}… here",
            where="spec.algorithm.teacher.uri",
            fix="put the same adapter there on each machine",
        )
