"""SGLang servers that the inference process starts, as an engine of the orchestrator's own; torch-free.

A server that is lost is lost for its `Replica`, as in one process: it has the inference process start another one,
which gets its adapters and is proven before it works again. A restarted inference process is told the adapters first.
Belongs here: the servers and their desk, seen from the orchestrator. Does not belong here: the connection
(`connection`), the inference process (`calls`), requests to servers (`rollout`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orbit_runtime.ports.guard import local_host
from orbit_runtime.rollout.sglang_api import RoutedLayers
from orbit_runtime.rollout.transport import AdapterTransfer
from orbit_runtime.rollout.wire import is_serving, requires_token
from orbit_runtime.services.connection import Connection
from orbit_runtime.services.shared_store import travelling
from orbit_runtime.types import AdapterFiles

ALIVE_SECONDS = 10.0


class RemoteServer:
    """An `OwnServer` of the inference process; it listens beside that process."""

    taps: Path | None = None

    def __init__(self, connection: Connection, index: int, *, deterministic: bool, routed: RoutedLayers | None) -> None:
        self._connection = connection
        self._index = index
        self._host = local_host(urlsplit(connection.url).hostname or "")
        self._told: Mapping[str, Any] = {"port": 0, "boot": None, "headers": {}}
        self.deterministic = deterministic
        self.routed = routed

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._told['port']}"

    @property
    def headers(self) -> Mapping[str, str]:
        return dict(self._told["headers"])

    def start(self) -> None:
        """Waits for a server that is not the one before; also for an inference process that is lost."""
        self._told = self._connection.call("start", self._index, self._told["boot"])

    def is_alive(self) -> bool:
        """Whether it answers; another server that took its port since does not count."""
        if not is_serving(self.url, seconds=ALIVE_SECONDS, headers=self.headers):
            return False
        return requires_token(self.url, seconds=ALIVE_SECONDS, headers=self.headers) is not False

    def describe(self) -> str:
        told: str | None = self._look("logs")
        return told or f"read what `orbit inference` at {self._connection.url} wrote"

    def stop(self) -> None:
        """Does nothing: `start` replaces a server that was lost, and the others stay for the next orchestrator."""

    def memory_bytes(self) -> int | None:
        found: int | None = self._look("memory")
        return found

    def _look(self, name: str) -> Any:
        told = self._connection.look(name)
        return told[self._index] if told else None


class RemoteMailbox:
    """A `Desk` on the inference process's machine."""

    def __init__(self, connection: Connection, share: Callable[[Callable[..., Any]], bool]) -> None:
        """Args: share: tests whether that process sees the run's store; see `shared_store`."""
        self._connection = connection
        self._share = share
        self._is_shared = share(connection.call)
        self._adapters: dict[str, AdapterFiles] = {}
        connection.on_restart = self._tell_again

    def take(self, name: str, adapter: AdapterFiles) -> None:
        with self._connection.turn:
            self._take(self._connection.call, name, adapter)
            self._adapters[name] = adapter

    def files(self, name: str) -> Path:
        return Path(self._connection.call("files", name))

    @contextmanager
    def carry(self, name: str, copies: Iterable[str]) -> Iterator[AdapterTransfer | None]:
        folder = self._connection.call("carry", name)
        try:
            yield None if folder is None else AdapterTransfer(Path(folder), copies)
        finally:
            self._connection.call("carried")

    @contextmanager
    def explaining(self, name: str) -> Iterator[Sequence[Path]]:
        folders = self._connection.call("explain", name)
        try:
            yield [Path(each) for each in folders]
        finally:
            self._connection.call("explained")

    def drop(self, name: str) -> None:
        with self._connection.turn:
            self._connection.call("drop", name)
            del self._adapters[name]

    def _take(self, tell: Callable[..., Any], name: str, adapter: AdapterFiles) -> None:
        tell("take", name, adapter.version, adapter.digest, travelling(adapter.files, self._is_shared))

    def _tell_again(self) -> None:
        tell = self._connection.tell
        self._is_shared = self._share(tell)
        for name, adapter in self._adapters.items():
            self._take(tell, name, adapter)
