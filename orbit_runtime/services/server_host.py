"""The inference process with `engine: SGLang`: it starts servers, replaces lost ones and puts adapters where they load.

The orchestrator calls the servers itself. Belongs here: building them from the manifest, and these calls. Does not
belong here: HTTP (`host`), the client (`remote_servers`), requests to a server (`rollout`).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Buffer, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from orbit_runtime.model_info.content import cached_weights_digest
from orbit_runtime.planner.support.served import check_served
from orbit_runtime.rollout.served_engine import start_servers
from orbit_runtime.rollout.sglang_server import SGLangServer
from orbit_runtime.rollout.transport import FolderMailbox, shared_memory
from orbit_runtime.services.host import Host
from orbit_runtime.services.shared_store import SharedStore
from orbit_runtime.services.side_manifest import SideManifest, common_facts
from orbit_runtime.sides.checkpoint_facts import facts_of_checkpoint
from orbit_runtime.sides.engines import engine_settings, place_of, plan_servers, starts_at_once
from orbit_runtime.storage import Part
from orbit_runtime.storage.download import Cache, default_cache
from orbit_runtime.types import AdapterFiles

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
        """The folder of a ticket: until `carried`, the adapter is in memory that servers map. None: it is in files."""
        handover = self._carrying.enter_context(self._desk.carry(name, ()))
        return None if handover is None else str(handover.folder)

    def carried(self) -> None:
        self._carrying.close()

    def explain(self, name: str) -> list[str]:
        """Until `explained`, the plug-in reports how a slot differs; the adapter's folders."""
        return [str(each) for each in self._explaining.enter_context(self._desk.explaining(name))]

    def explained(self) -> None:
        self._explaining.close()

    def calls(self) -> dict[str, Callable[..., Any]]:
        """The calls by name."""
        named = (
            self._depot.share, self.start, self.take, self.files, self.carry, self.carried, self.explain,
            self.explained, self._desk.drop,
        )  # fmt: skip
        return {each.__name__: each for each in named}

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
