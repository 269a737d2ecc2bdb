"""How a published adapter's bytes reach servers that run Orbit's plug-in, other than as files.

Belongs here: sending, which copies may still receive it, and when it is over. Does not belong here: receiving
(`sglang_plugin.arrival`), the load call (`replica`), files, which always work (`served.Loaded`).

`SharedMemory` is host memory: SGLang keeps adapters there and copies them into its slots itself, so passing GPU memory
would only move the bytes twice more. `Broadcast` reaches every server at once, on other machines too.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Buffer, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from orbit_runtime.adapters.buffer import opening_of, shared
from orbit_runtime.adapters.patience import seconds_for, total_bytes
from orbit_runtime.adapters.ticket import as_tensor, blocks, carried_bytes, write_ticket
from orbit_runtime.types import AdapterFiles

if TYPE_CHECKING:
    from orbit_runtime.adapters.group import Group

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
        from orbit_runtime.adapters.group import Opening

        self.copies, self.seconds = dict(copies), seconds
        self._opening = Opening(host, sum(ranks for _, ranks in copies.values()), seconds)
        self.source = self._opening.source
        self._group: Group | None = None
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
