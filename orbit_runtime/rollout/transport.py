"""How published adapters reach an engine's servers: as files in a folder that both see, or faster on the way there.

Belongs here: folders and files, the transports, which copies may still receive an adapter, and when that is over. Does
not belong here: receiving (`sglang_plugin.arrival`), the call that makes a server load one (`replica`).

Transports need Orbit's plug-in in the servers. `SharedMemory` is host memory: SGLang keeps adapters there and copies
them into its slots itself, so passing GPU memory would only move the bytes twice more. `Broadcast` reaches every server
at once, on other machines too.
"""

from __future__ import annotations

import secrets
import shutil
import threading
from collections.abc import Buffer, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from orbit_runtime.adapters.buffer import opening_of, shared
from orbit_runtime.adapters.files import seconds_for, total_bytes
from orbit_runtime.adapters.ticket import as_tensor, blocks, carried_bytes, write_ticket
from orbit_runtime.digests import first_difference
from orbit_runtime.errors import GateError
from orbit_runtime.storage import StoredFiles
from orbit_runtime.types import AdapterFiles

if TYPE_CHECKING:
    from orbit_runtime.adapters.group import BroadcastGroup


BROADCAST_SECONDS = 30.0
"""Limit for joining; a server handles no requests meanwhile."""
STEP_BYTES = 10_000_000
"""Granularity of sizes: an adapter of nearly the same size reuses the open group."""
LOOPBACK = "127.0.0.1"


class Handover:
    """One publish in transit."""

    def __init__(self, folder: Path, copies: Iterable[str], end: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            folder: the ticket's folder.
            end: called when a copy fails or will not come.
        """
        self.folder = folder
        self.end = end
        self._waiting = set(copies)

    def take(self, copy: str) -> bool:
        """Whether this copy is still expected; true once for each. A second try loads from files."""
        expected = copy in self._waiting
        self._waiting.discard(copy)
        return expected


class Transport(Protocol):
    """Safe to use for one publish after another, from one thread."""

    def carry(
        self, adapter: AdapterFiles, folder: Path, copies: Mapping[str, tuple[int, int]]
    ) -> AbstractContextManager[Handover | None]:
        """Keeps the bytes available within the context; None if there is no copy to wait for.

        Args:
            folder: a new folder for the ticket.
            copies: for each copy's name, its number of restarts and of processes that load an adapter.
        """
        ...

    def close(self) -> None: ...


class SharedMemory:
    """The memory into which the trainer wrote the adapter: servers map it, and nothing is copied.

    It is freed when the last process unmaps it, or when the run ends, however that happens.
    """

    @contextmanager
    def carry(
        self, adapter: AdapterFiles, folder: Path, copies: Mapping[str, tuple[int, int]]
    ) -> Iterator[Handover | None]:
        memory = shared(adapter)
        opening, places = opening_of(memory), {name: memory.places[name] for name in adapter.files}
        source = {"path": opening.path, "title": opening.title, "places": places}
        write_ticket(folder, adapter, "SharedMemory", source)
        yield Handover(folder, copies)

    def close(self) -> None:
        pass


class Broadcast:
    """A group that stays open across publishes, as long as its members are the same and none fails."""

    def __init__(self, host: str = LOOPBACK, seconds: float = BROADCAST_SECONDS) -> None:
        """
        Args:
            host: address at which servers reach this machine.
            seconds: limit for joining, and for a broadcast of an almost empty adapter.
        """
        self._host, self._seconds = host, seconds
        self._generation: _Generation | None = None

    @contextmanager
    def carry(
        self, adapter: AdapterFiles, folder: Path, copies: Mapping[str, tuple[int, int]]
    ) -> Iterator[Handover | None]:
        if not copies:
            yield None
            return
        parts = [*carried_bytes(adapter)]
        seconds = self._seconds + seconds_for(total_bytes(parts) // STEP_BYTES * STEP_BYTES)
        generation = self._open(copies, seconds)
        publish = secrets.token_hex(8)
        write_ticket(folder, adapter, "Broadcast", generation.source | {"publish": publish})
        sent = generation.send(publish, parts)
        try:
            yield Handover(folder, copies, generation.end)
        except BaseException:
            generation.end()
            raise
        if not generation.is_over:
            # Every copy has the bytes. If only this side did not finish, the group alone is no longer usable.
            wait([sent], seconds)
        if generation.is_over or not sent.done():
            self.close()
        else:
            generation.rest()

    def close(self) -> None:
        """Safe to call twice."""
        if self._generation is not None:
            self._generation.end()
            self._generation = None

    def _open(self, copies: Mapping[str, tuple[int, int]], seconds: float) -> _Generation:
        before = self._generation
        if before is None or before.is_over or before.copies != copies or before.seconds < seconds:
            self.close()
            self._generation = _Generation(self._host, copies, seconds)
        assert self._generation is not None
        return self._generation


class _Generation:
    def __init__(self, host: str, copies: Mapping[str, tuple[int, int]], seconds: float) -> None:
        from orbit_runtime.adapters.group import BroadcastOpening

        self.copies, self.seconds = dict(copies), seconds
        self._opening = BroadcastOpening(host, sum(ranks for _, ranks in copies.values()), seconds)
        self.source = self._opening.source
        self._group: BroadcastGroup | None = None
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def end(self) -> None:
        """Ends the group. A broadcast in progress ends by its timeout at the latest: gloo cannot be interrupted."""
        self._over.set()

    def rest(self) -> None:
        """Lets a member that joins now, because its server reloads a name itself, return without the next publish."""
        self._opening.announce("")

    def send(self, publish: str, parts: Sequence[Buffer]) -> Future[None]:
        """Sends in a thread that waits for members, which join as their servers handle the load call."""
        done: Future[None] = Future()
        self._opening.announce(publish)

        def work() -> None:
            try:
                if self._group is None:
                    self._group = self._opening.wait(lambda: self.is_over)
                for part in parts:
                    for block in blocks(part):
                        self._group.broadcast(as_tensor(block))
                done.set_result(None)
            except BaseException as error:
                self.end()
                self._group = None
                self._opening.close()
                done.set_exception(error)

        threading.Thread(target=work, name="broadcast", daemon=True).start()
        return done


def build_transport(kind: Literal["Auto", "File", "SharedMemory", "Broadcast"]) -> Transport | None:
    """The transport for servers of this machine, once `Auto` is resolved. None: adapters are loaded from files."""
    assert kind != "Auto"
    if kind == "File":
        return None
    return SharedMemory() if kind == "SharedMemory" else Broadcast()


EXPLAIN_FILE = "explain"
"""File beside an adapter's files that asks the plug-in for the difference between them and the slot."""


class Desk(Protocol):
    """Safe to use from several threads; each adapter is taken and dropped once."""

    def take(self, name: str, adapter: AdapterFiles) -> None:
        """Holds an adapter from now on, under a name that was never used before."""
        ...

    def files(self, name: str) -> Path:
        """The folder with its files, as servers see it. Safe to call twice.

        Raises:
            OrbitError: they cannot be put there, or are not what was published.
        """
        ...

    def carry(self, name: str, copies: Mapping[str, tuple[int, int]]) -> AbstractContextManager[Handover | None]:
        """Keeps its bytes available to these copies other than as files; None if they come as files.

        Args:
            copies: see `Transport.carry`.
        """
        ...

    def explaining(self, name: str) -> AbstractContextManager[Sequence[Path]]:
        """Within it the plug-in reports how a slot differs from what lies here; yields the places, as servers see
        them. For one caller at a time."""
        ...

    def drop(self, name: str) -> None: ...

    def close(self) -> None:
        """Safe to call twice."""
        ...


class FolderDesk:
    """A folder of this machine, which the servers see under the same path."""

    def __init__(self, folder: Path, transport: Transport | None = None) -> None:
        """Args: transport: how adapters reach servers; None: as files, and so where it fails. Closed with the desk."""
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

    def carry(self, name: str, copies: Mapping[str, tuple[int, int]]) -> AbstractContextManager[Handover | None]:
        if self._transport is None:
            return nullcontext()
        return self._transport.carry(self._adapters[name], self.ticket(name), copies)

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

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

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
