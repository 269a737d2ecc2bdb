"""The store that a run's processes share: large data goes there, and only its address and digests go over HTTP.

Whether they share it is tested, not configured: the orchestrator writes a word that only this store has; the side reads
it and writes its answer beside it. To a side that does not see the store, bytes go over HTTP, through the orchestrator.
"""

from __future__ import annotations

import mmap
import tempfile
import uuid
from collections.abc import Buffer, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from orbit_runtime.digests import first_difference
from orbit_runtime.errors import OrbitError, StorageError
from orbit_runtime.storage import Content, NotFound, Part, Store, StoredFiles, open_store, part_key, write_parts

PASSING = "handover"
"""Folder for data that nothing uses after the orchestrator that wrote it."""
MAPPED_BYTES = 1 << 20

# --- the orchestrator's end ---


def try_to_share(tell: Callable[..., Any], store: Store, execution: int) -> bool:
    """Whether a side reads and writes the run's store."""
    key, word = f"{PASSING}/e{execution:06d}/{uuid.uuid4().hex}", uuid.uuid4().hex
    store.put(key, word.encode())
    try:
        return bool(tell("share", store.uri, key, word)) and store.get(_answer(key)).decode() == word[::-1]
    except StorageError:
        # The side wrote to another store of the same name.
        return False
    finally:
        store.delete([key, _answer(key)])


def travelling(files: Mapping[str, Buffer], is_shared: bool) -> dict[str, Part | Buffer]:
    """Files in the form sent to a side: addresses if they are in the store that it shares, else the bytes."""
    return {**files.parts} if is_shared and isinstance(files, StoredFiles) else dict(files)


def sweep(store: Store) -> None:
    """Deletes what killed orchestrators left behind. For the only writer, at its start."""
    store.delete(store.list(f"{PASSING}/"))


# --- a side's end ---


class SharedStore:
    """The store from a side's view, once it is shared."""

    def __init__(self) -> None:
        self._store: Store | None = None

    def share(self, uri: str, key: str, word: str) -> bool:
        """Whether the store at that address is the orchestrator's, and writable."""
        self._store = None
        try:
            store = open_store(uri)
            if store.get(key).decode(errors="replace") != word:
                return False
            # As the orchestrator, this side makes no folder anew that was taken away.
            record = f"executions/{key.split('/')[1].removeprefix('e')}.json"
            with suppress(NotFound):
                store.owner = (record, store.get(record))
            store.put(_answer(key), word[::-1].encode())
        except OrbitError:
            return False
        self._store = store
        return True

    @property
    def store(self) -> Store:
        if self._store is None:
            raise StorageError(
                "this process does not see the run's store, as the one before it did",
                fix="start it where it does; the same command continues the run",
            )
        return self._store

    def read(self, files: Mapping[str, Part | Buffer]) -> dict[str, Buffer]:
        """Reads the files given by address, each piece verified by its digest.

        Raises:
            StorageError: (74) a file is gone, or differs from what was written.
        """
        return {name: self._read(each) if isinstance(each, Part) else each for name, each in files.items()}

    def _read(self, part: Part) -> Buffer:
        data = self.store.view(part.key)
        if memoryview(data).nbytes != part.bytes or first_difference(data, part.pieces) is not None:
            raise StorageError(
                f"{part.key} is not what was written there: its bytes have another digest",
                where=self.store.uri,
                fix="look for what else writes to the store; the same command continues the run",
            )
        return data


class SharedStoreWriter:
    """A `StateWriter` that has written everything when it returns."""

    def __init__(self, store: Store, folder: str, execution: int) -> None:
        self.parts: dict[str, Part] = {}
        self._store, self._folder, self._execution = store, folder, execution

    def write(self, name: str, size: int, pieces: Callable[[], Iterable[Buffer]]) -> None:
        key = part_key(self._folder, name, self._execution)
        self.parts |= {name: write_parts(self._store, {key: Content(size, pieces)})[key]}

    def wait(self) -> None:
        """Returns at once: nothing is read later."""


class HeldWriter:
    """A `StateWriter` that holds the parts, large ones on this machine's disk."""

    def __init__(self) -> None:
        self.parts: dict[str, Buffer] = {}

    def write(self, name: str, size: int, pieces: Callable[[], Iterable[Buffer]]) -> None:
        self.parts[name] = spooled(pieces(), size)

    def wait(self) -> None:
        """Returns at once: nothing is read later."""


def spooled(pieces: Iterable[Buffer], size: int) -> Buffer:
    """Joins pieces of `size` bytes in all; large data in an unnamed file that is freed with the result."""
    if size < MAPPED_BYTES:
        data = b"".join(pieces)
        assert len(data) == size, f"{len(data)} bytes, not {size}"
        return data
    with tempfile.TemporaryFile() as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        assert file.tell() == size, f"{file.tell()} bytes, not {size}"
        return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY))


def _answer(key: str) -> str:
    return f"{key}-answer"
