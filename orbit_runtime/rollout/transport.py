"""How published adapters reach an engine's servers: as files in a folder that both see, or in the host's memory.

Belongs here: folders and files, which copies may still receive an adapter by memory, and when that is over. Does not
belong here: receiving (`sglang_plugin.adapter_loading`), the call that makes a server load one (`replica`).

Memory needs Orbit's plug-in in the servers. SGLang keeps adapters in the host's memory and copies them into its slots
itself, so passing GPU memory would only move the bytes twice more.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from orbit_runtime.adapters.buffer import opening_of, shared
from orbit_runtime.adapters.ticket import write_ticket
from orbit_runtime.digests import first_difference
from orbit_runtime.errors import GateError
from orbit_runtime.storage import StoredFiles
from orbit_runtime.types import AdapterFiles
from orbit_runtime.workers.servers.protocol import EXPLAIN_FILE


class AdapterTransfer:
    """One publish in transit."""

    def __init__(self, folder: Path, copies: Iterable[str]) -> None:
        """Args: folder: the ticket's folder."""
        self.folder = folder
        self._waiting = set(copies)

    def take(self, copy: str) -> bool:
        """Whether this copy is still expected; true once for each. A second try loads from files."""
        expected = copy in self._waiting
        self._waiting.discard(copy)
        return expected


Transport = Callable[[AdapterFiles, Path, Iterable[str]], AbstractContextManager[AdapterTransfer | None]]
"""Keeps an adapter's bytes available within the context to the copies of these names; None if it cannot.

Its second argument is a new folder for the ticket.
"""


@contextmanager
def shared_memory(adapter: AdapterFiles, folder: Path, copies: Iterable[str]) -> Iterator[AdapterTransfer]:
    """The memory into which the trainer wrote the adapter: servers map it, and nothing is copied.

    It is freed when the last process unmaps it, or when the run ends, however that happens.
    """
    memory = shared(adapter)
    write_ticket(folder, adapter, opening_of(memory), {name: memory.places[name] for name in adapter.files})
    yield AdapterTransfer(folder, copies)


class AdapterMailbox(Protocol):
    """Safe to use from several threads; each adapter is taken and dropped once."""

    def take(self, name: str, adapter: AdapterFiles) -> None:
        """Holds an adapter from now on, under a name that was never used before."""

    def files(self, name: str) -> Path:
        """The folder with its files, as servers see it. Safe to call twice.

        Raises:
            OrbitError: they cannot be put there, or are not what was published.
        """

    def carry(self, name: str, copies: Iterable[str]) -> AbstractContextManager[AdapterTransfer | None]:
        """Keeps its bytes available to these copies other than as files; None if they come as files."""

    def explaining(self, name: str) -> AbstractContextManager[Sequence[Path]]:
        """Within it the plug-in reports how a slot differs from what lies here; yields the places, as servers see
        them. For one caller at a time."""

    def drop(self, name: str) -> None: ...


class FolderMailbox:
    """A folder of this machine, which the servers see under the same path."""

    def __init__(self, folder: Path, transport: Transport | None = None) -> None:
        """Args: transport: how adapters reach servers; None: as files, and so where it fails."""
        self._folder = folder
        self._transport = transport
        self._adapters: dict[str, AdapterFiles] = {}
        self._writing = threading.Lock()

    def home(self, name: str) -> Path:
        """The folder of its files, which are written when a server first loads from files."""
        return self._folder / name

    def ticket(self, name: str) -> Path:
        """The folder given to servers that load by the transport."""
        return self.home(name) / "ticket"

    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def take(self, name: str, adapter: AdapterFiles) -> None:
        self.home(name).mkdir(parents=True)
        self._adapters[name] = adapter

    def files(self, name: str) -> Path:
        return self._write(name, self.home(name))

    def carry(self, name: str, copies: Iterable[str]) -> AbstractContextManager[AdapterTransfer | None]:
        if self._transport is None:
            return nullcontext()
        return self._transport(self._adapters[name], self.ticket(name), copies)

    @contextmanager
    def explaining(self, name: str) -> Iterator[Sequence[Path]]:
        homes = [home for home in (self.home(name), self.ticket(name)) if home.is_dir()]
        for home in homes:
            (self._write(name, home) / EXPLAIN_FILE).touch()
        try:
            yield homes
        finally:
            for home in homes:
                (home / EXPLAIN_FILE).unlink()

    def drop(self, name: str) -> None:
        """Also deletes the files, so that a server that reloads a name by itself finds nothing."""
        del self._adapters[name]
        shutil.rmtree(self.home(name))

    def _write(self, name: str, folder: Path) -> Path:
        adapter = self._adapters[name]
        with self._writing:
            for file in adapter.files:
                if not (folder / file).exists():
                    (folder / file).write_bytes(_proven(adapter, file))
        return folder


def _proven(adapter: AdapterFiles, file: str) -> memoryview:
    """A file's bytes. Raises GateError for one of a store that somebody has changed since it was published."""
    files, content = adapter.files, adapter.files[file]
    if (
        isinstance(files, StoredFiles)
        and adapter.pieces
        and first_difference(content, adapter.pieces[file]) is not None
    ):
        raise GateError(f"{files.parts[file].key} is not what the trainer wrote there", where=files.store.uri)
    return memoryview(content)
