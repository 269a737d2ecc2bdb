"""An engine over SGLang servers that Orbit starts and ends together.

Belongs here: starting them, and refusing a server in which nothing could be proven. Does not belong here: a server's
arguments (`sglang_server`), attached servers (`attached`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from orbit_runtime.errors import EngineDiedError
from orbit_runtime.rollout.desk import Desk
from orbit_runtime.rollout.replica import PATIENCE_SECONDS, Replica
from orbit_runtime.rollout.served import Server, Sleeping
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.rollout.sglang_api import RoutedLayers, SGLangApi
from orbit_runtime.rollout.wire import Wire, build_client
from orbit_runtime.types import Tokenizer


class OwnServer(Server, Protocol):
    """An SGLang server that Orbit starts, in this process's machine or by `orbit inference`."""

    @property
    def deterministic(self) -> bool:
        """Whether it was set up for requests that bring their seed."""
        ...

    @property
    def routed(self) -> RoutedLayers | None:
        """Layers whose experts it reports; None for none."""
        ...

    @property
    def taps(self) -> Path | None:
        """Folder through which the plug-in is asked what a pass computed; None if it is on another machine."""
        ...


def start_engine(
    servers: Sequence[OwnServer],
    tokenizer: Tokenizer,
    *,
    desk: Desk,
    max_running_requests: int,
    at_once: int = 1,
    patience: float = PATIENCE_SECONDS,
    sleeping: Sequence[Sleeping] = (),
) -> ServedEngine:
    """Starts the servers; if one fails, all are stopped.

    Args:
        desk: where the servers find adapters; closed with the engine.
        at_once: servers that start at the same time; on a CPU they would slow each other down.
        sleeping: what the servers, started with support for it, release while the trainer works.
        patience: seconds that a request may take before its server is checked for progress.

    Raises:
        EngineDiedError: a server does not start, or runs without Orbit's plug-in.
    """
    client = build_client()
    engine = ServedEngine(
        tokenizer, client, desk=desk, max_running_requests=max_running_requests, sleeping=sleeping
    )  # fmt: skip
    try:
        start_servers(servers, at_once)
        replicas = []
        for index, server in enumerate(servers):
            name = "the engine" if len(servers) == 1 else f"replica {index}"
            api = SGLangApi(Wire(client, server), deterministic=server.deterministic, routed=server.routed)
            replicas.append(
                Replica(name, server, api, engine.loaded, taps=server.taps, whose="Ours", patience=patience)
            )
        engine.attach(replicas)
        for replica in replicas:
            if not replica.reads_back:
                raise EngineDiedError(
                    f"{replica.name} runs without Orbit's plug-in, so no adapter could be proven in it",
                    fix=replica.server.describe(),
                )
    except BaseException:
        for server in servers:
            server.stop()
        engine.close()
        raise
    return engine


def start_servers(servers: Sequence[Server], at_once: int) -> None:
    """Returns once all respond. Raises: as `Server.start`."""
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda server: server.start(), servers))
