"""An engine over SGLang servers that Orbit starts and ends together.

Belongs here: starting them, and refusing a server in which nothing could be proven. Does not belong here: a server's
arguments (`sglang_server`), attached servers (`attached`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from orbit_runtime.errors import EngineDiedError
from orbit_runtime.rollout.handover import Transport
from orbit_runtime.rollout.replica import PATIENCE_SECONDS, Replica
from orbit_runtime.rollout.served import Sleeping
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.rollout.sglang_api import SGLangApi
from orbit_runtime.rollout.sglang_server import SGLangServer
from orbit_runtime.rollout.wire import Wire, build_client
from orbit_runtime.types import Tokenizer


def start_engine(
    servers: Sequence[SGLangServer],
    tokenizer: Tokenizer,
    *,
    folder: Path,
    max_running_requests: int,
    at_once: int = 1,
    patience: float = PATIENCE_SECONDS,
    sleeping: Sequence[Sleeping] = (),
    transport: Transport | None = None,
) -> ServedEngine:
    """Starts the servers; if one fails, all are stopped.

    Args:
        folder: parent of the folders through which adapters are handed over.
        at_once: servers that start at the same time; on a CPU they would slow each other down.
        sleeping: what the servers, started with support for it, release while the trainer works.
        transport: how adapters are handed over; None: as files. Closed with the engine.
        patience: seconds that a request may take before its server is checked for progress.

    Raises:
        EngineDiedError: a server does not start, or runs without Orbit's plug-in.
    """
    client = build_client()
    engine = ServedEngine(
        tokenizer, client, folder=folder, max_running_requests=max_running_requests, sleeping=sleeping,
        transport=transport,
    )  # fmt: skip
    try:
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(SGLangServer.start, servers))
        replicas = []
        for index, server in enumerate(servers):
            name = "the engine" if len(servers) == 1 else f"replica {index}"
            api = SGLangApi(Wire(client, server), deterministic=server.deterministic, routed=server.routed)
            replicas.append(Replica(name, server, api, engine.loaded, taps=server.taps, patience=patience))
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
