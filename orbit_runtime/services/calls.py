"""What the processes of a run compute for its orchestrator: calls of the trainer's side, of the torch engine, and of
SGLang's servers, which are started, replaced when lost, and given adapters where they load. The sides are the same as
those of `orbit run`.

The orchestrator asks the servers itself. Belongs here: building the sides from the manifest, and their calls. Does not
belong here: HTTP (`host`), the clients (`remote_trainer`, `remote_engine`, `remote_servers`).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Buffer, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from orbit_runtime.adapters.buffer import AdapterBuffer
from orbit_runtime.adapters.files import files_digest
from orbit_runtime.adapters.foreign import load_foreign
from orbit_runtime.adapters.inject import AdaptedLayer
from orbit_runtime.adapters.state import remove_slot
from orbit_runtime.checkpoints.adapter_folder import AdapterFolder, build_adapter, open_adapter
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.digests import split
from orbit_runtime.errors import OrbitError, UsageError
from orbit_runtime.model_info.content import cached_weights_digest
from orbit_runtime.planner.support.served import check_served
from orbit_runtime.policy.facts import PolicyFacts
from orbit_runtime.rollout.served_engine import start_servers
from orbit_runtime.rollout.sglang_server import SGLangServer
from orbit_runtime.rollout.torch_engine import TorchEngine
from orbit_runtime.rollout.transport import FolderMailbox, shared_memory
from orbit_runtime.services.host import Host
from orbit_runtime.services.shared_store import HeldWriter, SharedStore, SharedStoreWriter
from orbit_runtime.services.side_manifest import SideManifest, common_facts, kinds_of
from orbit_runtime.sides.checkpoint_facts import facts_of_checkpoint
from orbit_runtime.sides.engines import build_torch_engine, engine_settings, place_of, plan_servers, starts_at_once
from orbit_runtime.sides.interface import TrainerOrder, TrainerSide
from orbit_runtime.sides.local import LocalSides
from orbit_runtime.sides.machine import rounding_facts
from orbit_runtime.sides.trainers import build_policy
from orbit_runtime.storage import Content, Part, write_parts
from orbit_runtime.storage.cache import Cache, default_cache
from orbit_runtime.types import AdapterFiles, Completion, Probe

Operation = tuple[str, Sequence[Any]]
"""`submit` with requests, or `abort` with their ids."""


class EngineCalls:
    """Calls of an engine, for one thread."""

    def __init__(
        self, build: Callable[[], TorchEngine], layers: Mapping[str, AdaptedLayer], teacher: AdapterFolder | None
    ) -> None:
        self._build = build
        self._layers = layers
        self._teacher = teacher
        self._engine = build()
        self._depot = SharedStore()

    def reset(self) -> None:
        self._engine.abort()
        while self._engine.advance():
            pass
        self._engine.close()
        # Names retired in one session are new in the next.
        self._engine = self._build()

    def advance(self, operations: Sequence[Operation], steps: int) -> list[Completion]:
        """Completions that ended within `steps` batch steps."""
        for kind, given in operations:
            if kind == "submit":
                self._engine.submit(list(given))
            else:
                self._engine.abort(list(given))
        return [completion for _ in range(steps) for completion in self._engine.advance()]

    def load_adapter(self, name: str, version: int, digest: str, files: Mapping[str, Part | Buffer]) -> None:
        self._engine.load_adapter(name, AdapterFiles(version, self._depot.read(files), digest))

    def adopt(self, name: str, version: int) -> None:
        """Loads the teacher for as long as it is used."""
        assert self._teacher is not None, "another teacher than an adapter is not asked"
        load_foreign(self._layers, name, self._teacher.config, self._teacher.files, self._teacher.place)
        self._engine.adopt(name, version)

    def release(self, name: str) -> None:
        self._engine.release(name)
        remove_slot(self._layers, name)

    def explain_slot(self, name: str, version: int, digest: str, files: Mapping[str, Part | Buffer]) -> str:
        return self._engine.explain_slot(name, AdapterFiles(version, self._depot.read(files), digest))

    def calls(self) -> dict[str, Callable[..., Any]]:
        """The calls by name."""
        own = (self._depot.share, self.advance, self.load_adapter, self.adopt, self.release, self.explain_slot)
        return {each.__name__: each for each in own} | {
            # Of the engine at the time of the call: `reset` replaces it.
            "unload_adapter": lambda name: self._engine.unload_adapter(name),
            "score": lambda token_ids_T, adapters: self._engine.score(token_ids_T, adapters),
            "adapter_digest": lambda name: self._engine.adapter_digest(name),
        }


def build_inference_host(asked: SideManifest, address: str, note: Callable[[str], None], closing: ExitStack) -> Host:
    """Builds the host of the torch engine or of SGLang's servers.

    Args:
        address: of the process, and of servers beside it.
        closing: ends the servers.

    Raises:
        OrbitError: the same errors as `orbit run` raises with this manifest before its first step.
    """
    resolved, spec = asked.resolved, asked.resolved.run.spec
    if "inference" not in kinds_of(spec):
        of_endpoints = spec.rollout.engine == "OpenAI"
        raise UsageError(
            "the servers of spec.rollout.endpoints sample" if of_endpoints else "nothing is sampled for demonstrations",
            where="spec.rollout.engine" if of_endpoints else "spec.algorithm.type",
            fix="start `orbit trainer` and `orbit orchestrator` alone",
        )
    if resolved.engine == "SGLang":
        return build_server_host(asked, address, note, closing)
    policy = build_policy(resolved, asked.folder, "None", note)
    build = partial(build_torch_engine, policy, ChatTokenizer(asked.folder, spec.data.chat), spec.rollout)
    calls = EngineCalls(build, policy.injected.layers, asked.teacher)
    facts = common_facts("inference", asked, policy.base_digest(), rounding_facts())
    return Host({**facts, "gives_same_bits": policy.gives_same_bits}, calls.calls(), calls.reset)


class TrainerCalls:
    """Calls of a trainer, for one thread."""

    def __init__(self, side: TrainerSide) -> None:
        self._side = side
        self._depot = SharedStore()
        self._trainer = side.trainer
        self._probing = ExitStack()
        self._initial = self.save()

    def reset(self) -> None:
        self.probe(None)
        self._trainer.load_state(self._initial)

    def begin(self, place: str, digest: str, files: Mapping[str, Buffer] | None) -> bool:
        """Begins with the adapter of that digest. False if `files` is None and `place` holds no such adapter here."""
        adapter = _adapter_at(place, digest) if files is None else build_adapter(place, files)
        if adapter is not None:
            self._side.begin(adapter, digest)
        return adapter is not None

    def publish_to(self, folder: str, standing: Mapping[str, Part]) -> dict[str, Part] | None:
        """Writes the adapter's files to a folder of the store. Returns None, and writes nothing, if others are
        `standing`.
        """
        buffer = AdapterBuffer()
        manifest = self._trainer.publish(buffer)
        parts = {name: Part(f"{folder}{name}", pieces) for name, pieces in manifest.files.items()}
        if standing and parts != standing:
            return None
        files = buffer.files()
        write_parts(
            self._depot.store,
            {
                part.key: Content(part.bytes, partial(split, files[name], part.pieces), part.pieces)
                for name, part in parts.items()
            },
        )
        return parts

    def publish(self) -> dict[str, Any]:
        buffer = AdapterBuffer()
        manifest = self._trainer.publish(buffer)
        return {"files": buffer.files(), "pieces": {name: list(each) for name, each in manifest.files.items()}}

    def explain(self, files: Mapping[str, Part | Buffer]) -> str:
        return "" if self._side.explain is None else self._side.explain(self._depot.read(files))

    def save(self) -> dict[str, Buffer]:
        held = HeldWriter()
        self._trainer.save_state(held)
        return held.parts

    def save_to(self, folder: str, execution: int) -> dict[str, Part]:
        """Like `save`, but to a folder of the store."""
        writer = SharedStoreWriter(self._depot.store, folder, execution)
        self._trainer.save_state(writer)
        return writer.parts

    def load(self, parts: Mapping[str, Part | Buffer]) -> None:
        self._trainer.load_state(self._depot.read(parts))

    def probe(self, kind: Probe | None) -> None:
        self._probing.close()
        if kind is not None:
            self._probing.enter_context(self._side.probing(kind))

    def calls(self) -> dict[str, Callable[..., Any]]:
        """The calls by name."""
        own = (
            self.begin, self.explain, self.publish, self.publish_to, self.save, self.save_to, self.load, self.probe,
        )  # fmt: skip
        return {each.__name__: each for each in own} | {
            "share": self._depot.share,
            # Ranks are not told others: their process does not say that it decides them.
            "take_rates": getattr(self._trainer, "take_rates", None),
            "update": self._trainer.update,
            "column": self._trainer.column,
            "score": self._trainer.score,
            "base_digest": self._side.base_digest,
        }


def _adapter_at(place: str, digest: str) -> AdapterFolder | None:
    try:
        adapter = open_adapter(place)
    except OrbitError:
        return None
    return adapter if files_digest(adapter.files) == digest else None


def build_trainer_host(asked: SideManifest, note: Callable[[str], None], closing: ExitStack) -> Host:
    """
    Raises:
        OrbitError: the same errors as `orbit run` raises with this manifest before its first step.
    """
    sides = LocalSides(note)
    sides.load_loss(asked.resolved, asked.inputs.search_path, None)
    resolved = sides.settle(asked.resolved, asked.folder)
    side = sides.open(TrainerOrder(resolved, asked.folder, asked.model, closing, asked.teacher))
    from pydantic import TypeAdapter

    facts = {
        **common_facts("trainer", asked, side.base_digest(), side.rounding),
        "policy": TypeAdapter(PolicyFacts).dump_python(side.facts, mode="json"),
        "gives_same_bits": resolved.engine == "Torch" and side.gives_same_bits(),
    }
    calls = TrainerCalls(side)
    return Host(facts, calls.calls(), calls.reset, is_over=side.is_over)


CLEAR_SECONDS = 60.0
"""Longest that a server may take to end its requests and forget an adapter."""


@dataclass
class _Started:
    server: SGLangServer
    boot: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Name of its process; a new process has another one."""

    def renew(self) -> None:
        self.server.stop()
        self.server.start()
        self.boot = uuid.uuid4().hex


class ServerCalls:
    """Calls of servers, for one thread."""

    def __init__(self, servers: Sequence[SGLangServer], desk: FolderMailbox) -> None:
        """Args: servers: they respond by now."""
        self._servers = [_Started(each) for each in servers]
        self._desk = desk
        self._depot = SharedStore()
        self._carrying = ExitStack()
        self._explaining = ExitStack()

    def reset(self) -> None:
        """Empties the servers of adapters and requests; one that fails to do so is replaced when it is needed."""
        self._carrying.close()
        self._explaining.close()
        for each in self._servers:
            if each.server.is_alive() and not _cleared(each.server):
                each.server.stop()
        for name in self._desk.names():
            self._desk.drop(name)

    def start(self, index: int, lost: str | None) -> dict[str, Any]:
        """The address of this server: a running process other than the lost one."""
        each = self._servers[index]
        if each.boot == lost or not each.server.is_alive():
            each.renew()
        return {"port": each.server.port, "boot": each.boot, "headers": dict(each.server.headers)}

    def take(self, name: str, version: int, digest: str, files: Mapping[str, Part | Buffer]) -> None:
        self._desk.take(name, AdapterFiles(version, self._depot.read(files), digest))

    def files(self, name: str) -> str:
        """The folder with the adapter's files."""
        return str(self._desk.files(name))

    def carry(self, name: str) -> str | None:
        """The folder of a ticket: the adapter is in memory that servers map, until `carried`. None: it is in files."""
        handover = self._carrying.enter_context(self._desk.carry(name, ()))
        return None if handover is None else str(handover.folder)

    def explain(self, name: str) -> list[str]:
        """Until `explained`, the plug-in reports how a slot differs; the adapter's folders."""
        return [str(each) for each in self._explaining.enter_context(self._desk.explaining(name))]

    def calls(self) -> dict[str, Callable[..., Any]]:
        """The calls by name."""
        named = (self._depot.share, self.start, self.take, self.files, self.carry, self.explain, self._desk.drop)
        calls = {each.__name__: each for each in named}
        return {**calls, "carried": self._carrying.close, "explained": self._explaining.close}

    def looks(self) -> dict[str, Callable[[], Any]]:
        """Memory in use, and the end of the log, of each server. For any thread."""
        return {
            "memory": lambda: [each.server.memory_bytes() for each in self._servers],
            "logs": lambda: [each.server.describe() for each in self._servers],
        }


def _cleared(server: SGLangServer) -> bool:
    with httpx.Client(
        base_url=server.url, headers=dict(server.headers), timeout=CLEAR_SECONDS, trust_env=False
    ) as client:
        try:
            client.post("/abort_request", json={"rid": "", "abort_all": True}).raise_for_status()
            models = client.get("/v1/models").raise_for_status().json()["data"]
            for name in [str(model["id"]) for model in models if model.get("parent")]:
                client.post("/unload_lora_adapter", json={"lora_name": name}).raise_for_status()
        except (httpx.HTTPError, ValueError, KeyError):
            return False
    return True


def build_server_host(asked: SideManifest, address: str, note: Callable[[str], None], closing: ExitStack) -> Host:
    """
    Args:
        address: where the servers listen too.
        closing: the servers are ended there.

    Raises:
        OrbitError: the same errors as `orbit run` raises with this manifest before its first step.
    """
    settings = engine_settings(asked.resolved)
    facts = facts_of_checkpoint(asked.folder, settings.adapter, settings.compute_dtype)
    check_served(facts.served(place_of(settings)))
    scratch = Path(closing.enter_context(TemporaryDirectory(prefix="orbit-sglang-")))
    servers = plan_servers(settings, facts, asked.folder, scratch, address)
    for server in servers:
        closing.callback(server.stop)
    note(f"starting {len(servers)} SGLang server{'s' if len(servers) > 1 else ''}")
    start_servers(servers, starts_at_once(settings))
    transport = shared_memory if settings.rollout.adapter_transport == "SharedMemory" else None
    calls = ServerCalls(servers, FolderMailbox(scratch / "adapters", transport))
    weights = cached_weights_digest(asked.folder, Cache(default_cache(os.environ)))
    told = {**common_facts("inference", asked, weights, {}), "servers": len(servers)}
    return Host(told, calls.calls(), calls.reset, calls.looks())
