"""Trainer and inference as hosts in threads of this process, which can be killed and started again at their ports.

A host that is killed answers nobody any more, and what it computes is lost: its successor is built anew from the
manifest, as a new process would be.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from orbit_runtime.errors import OrbitError
from orbit_runtime.loop.run import RunResult, run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.observability.server import HTTPServer
from orbit_runtime.services.calls import build_inference_host, build_trainer_host
from orbit_runtime.services.connection import Connection
from orbit_runtime.services.host import Host, start_host
from orbit_runtime.services.orchestrate import RemoteSides
from orbit_runtime.services.side_manifest import SideManifest, kinds_of, open_manifest
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage.cache import RetryPolicy

TOKEN = "a-token"


class Side:
    """One of the two, until it is killed."""

    def __init__(self, kind: str, manifest: dict[str, Any], *, port: int = 0) -> None:
        self.kind = kind
        self.port = port
        self.killed_after: int | None = None
        """Calls that it still carries out; the answer of the last one is lost."""
        self._manifest = manifest
        self._closing = ExitStack()
        self.start()

    def start(self) -> None:
        asked = open_manifest(OrbitRun.model_validate(self._manifest), Path.cwd(), RetryPolicy())
        self.host: Host = self.build(asked)
        self._stopped = threading.Event()
        self._server: HTTPServer = start_host(self.host, "127.0.0.1", self.port, TOKEN)
        self.port = self._server.port
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        with suppress(OrbitError):
            self.host.work(self._stopped.is_set)

    def build(self, asked: SideManifest) -> Host:
        if self.kind == "trainer":
            return build_trainer_host(asked, [].append, self._closing)
        return build_inference_host(asked, "127.0.0.1", [].append, self._closing)

    def kill(self) -> None:
        self._stopped.set()
        server = self._server._server
        server.force_exit = True
        self._server.close(0.0)
        for connection in [*server.server_state.connections]:
            # In the server's own thread: uvloop's transports are for no other, and crash the process now and then.
            with suppress(RuntimeError):  # the loop has ended meanwhile
                connection.loop.call_soon_threadsafe(connection.transport.abort)
        self._server._thread.join(5)
        self._closing.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def two_sides(manifest: dict[str, Any]) -> Iterator[dict[str, Side]]:
    """The trainer alone, where nothing is sampled."""
    made = {kind: Side(kind, manifest) for kind in kinds_of(OrbitRun.model_validate(manifest).spec)}
    try:
        yield made
    finally:
        for side in made.values():
            side.kill()


def remote_sides(sides: dict[str, Side], *, token: str | None = TOKEN, patience: float = 600.0) -> RemoteSides:
    lines = {kind: Connection(kind, side.url, token, patience=patience) for kind, side in sides.items()}
    return RemoteSides(lines["trainer"], lines.get("inference"))


def run_apart(manifest: dict[str, Any], out: Path, sides: dict[str, Side]) -> RunResult:
    spec = OrbitRun.model_validate(manifest)
    return run(spec, out=str(out), progress=SilentProgress(), sides=remote_sides(sides))
