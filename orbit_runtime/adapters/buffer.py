"""A published adapter in memory: written once, piece by piece, and read in place by every process that needs it.

The memory is an anonymous file (`memfd_create`): this process maps it, servers on this machine map it through
`/proc/<pid>/fd/<n>`, and the kernel frees it when the last of them releases it, however the run ends. It is not part of
/dev/shm, whose size in a container is unrelated to the machine's memory. Once written it is sealed: neither this
process nor any other can change it.

Belongs here: that memory. Does not belong here: announcing it to servers (`rollout.transport`), its contents (`state`).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import tempfile
import weakref
from collections import deque
from collections.abc import Buffer, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from orbit_runtime.digests import PieceHasher, Pieces, cut, hash_pieces
from orbit_runtime.errors import OutOfMemoryError
from orbit_runtime.types import AdapterFiles, AdapterMemory, Trainer

SMALL_BYTES = 1 << 16
"""Files up to this size are held as `bytes`: settings are parsed and compared."""
_BLOCK_BYTES = 1 << 20
"""Requested at a time: still in a core's cache when it is written."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux, which Python does not name."""


@dataclass(frozen=True, slots=True)
class MemoryOpening:
    """Where other processes of this machine open the memory."""

    path: str
    title: str
    """The name of its descriptor; no other memory has it, on this machine or another."""


class AdapterBuffer:
    """An `AdapterSink` and then an `AdapterMemory`, for one adapter and one writing thread."""

    def __init__(self) -> None:
        self.descriptor = _open_memory()
        """Open as long as this object lives."""
        self._closing = weakref.finalize(self, os.close, self.descriptor)
        self._end = 0
        self._is_sealed = False
        self.places: dict[str, tuple[int, int]] = {}

    def write(self, name: str, size: int, pieces: Iterable[Buffer]) -> Pieces:
        """
        Raises:
            OutOfMemoryError: the adapter does not fit; the memory written so far is freed with this object.
        """
        hasher, start = PieceHasher(), self.reserve(name, size)
        position = start
        for piece in pieces:
            hasher.add(piece)
            position = write_place(self.descriptor, memoryview(piece).cast("B"), position, start + size)
        assert position == start + size, f"{name} has {position - start} bytes, not {size}"
        return hasher.result()

    def fill(self, name: str, sizes: Sequence[int], write: Iterable[int]) -> Pieces:
        """
        Raises:
            OutOfMemoryError: as from `write`; whoever fills the file raises it.
        """
        size = sum(sizes)
        start = self.allot(name, size)
        if size <= SMALL_BYTES:
            deque(write, maxlen=0)
            return hash_pieces(cut(read_place(self.descriptor, start, size), sizes))
        # What lies here needs no other memory while it waits.
        hasher, hashed = PieceHasher(in_flight_bytes=size), 0
        pieces = cut(read_place(self.descriptor, start, size), sizes)
        for end in write:
            while hashed < end:
                piece = next(pieces)
                hasher.add(piece)
                hashed += piece.nbytes
        assert hashed == size, f"{name} has {hashed} bytes, not {size}"
        return hasher.result()

    def reserve(self, name: str, size: int) -> int:
        """The place of a file that is written later; returns its first byte."""
        start = self._end
        self.places[name] = (start, size)
        # Files are mapped separately, and a mapping starts at a page boundary.
        self._end = -(-(start + size) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return start

    def allot(self, name: str, size: int) -> int:
        """`reserve` for writing through a `MappedPlace`. The memory is taken only when it is written to."""
        start = self.reserve(name, size)
        try:
            os.ftruncate(self.descriptor, start + size)
        except OSError as error:
            raise _told(error, 0, start + size) from None
        return start

    def files(self) -> dict[str, Buffer]:
        """Every file by name. Nothing can be written afterwards."""
        self.seal()
        return {name: read_place(self.descriptor, *place) for name, place in self.places.items()}

    def seal(self) -> None:
        """Prevents any further write or change of size, by any process. Safe to call twice."""
        if not self._is_sealed:
            _seal(self.descriptor)
            self._is_sealed = True


def opening_of(memory: AdapterMemory) -> MemoryOpening:
    return MemoryOpening(
        f"/proc/{os.getpid()}/fd/{memory.descriptor}", os.readlink(f"/proc/self/fd/{memory.descriptor}")
    )


@contextmanager
def opened(opening: MemoryOpening, flags: int) -> Iterator[int]:
    """A descriptor of another process's memory.

    Raises:
        OSError: that process is on another machine, or has given the memory back.
    """
    # The number may refer to another file by now, even to one on which opening would block.
    descriptor = os.open(opening.path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if os.readlink(f"/proc/self/fd/{descriptor}") != opening.title:
            raise FileNotFoundError(errno.ENOENT, "the memory was given back", opening.path)
        yield descriptor
    finally:
        os.close(descriptor)


def write_place(descriptor: int, view: memoryview, position: int, end: int) -> int:
    """Writes at `position`; returns the position behind it.

    Args:
        view: bytes.
        end: of the file, for the error.

    Raises:
        OutOfMemoryError: this machine has no memory left for it.
    """
    while view:
        try:
            written = os.pwrite(descriptor, view, position)
        except OSError as error:
            raise _told(error, position, end) from None
        position += written
        view = view[written:]
    return position


def _told(error: OSError, position: int, end: int) -> OSError | OutOfMemoryError:
    if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EFAULT):
        return error
    return OutOfMemoryError(
        f"the adapter needs {end / 2**20:.0f} MiB of this machine's memory, and {position / 2**20:.0f} MiB "
        f"could be had: {os.strerror(error.errno).lower()}",
        where="publish",
        fix="give the run more memory, or lower spec.adapter's rank or block size",
    )


class MappedPlace:
    """A place to write to without system calls, which the kernel makes one after the other for all writers of a memory.

    Its pages are requested before they are written to, so that a machine without memory answers with an error instead
    of a signal that ends the process. No view of it may be left when the memory is sealed.
    """

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        """Args: descriptor: open for reading and writing; the place lies within the file."""
        self._descriptor = descriptor
        self._offset = start % mmap.ALLOCATIONGRANULARITY
        self._start = start - self._offset
        self._mapping = mmap.mmap(descriptor, self._offset + size, offset=self._start)
        self._blocks: set[int] = set()

    def view(self, begin: int, end: int) -> memoryview:
        """The bytes from `begin` to `end` of this place, to be written.

        Raises:
            OutOfMemoryError: this machine has no memory left for them.
        """
        first, last = self._offset + begin, self._offset + end
        for block in range(first // _BLOCK_BYTES, -(-last // _BLOCK_BYTES)):
            if block not in self._blocks:
                self._request(block * _BLOCK_BYTES)
                self._blocks.add(block)
        return memoryview(self._mapping)[first:last]

    def _request(self, begin: int) -> None:
        size = min(_BLOCK_BYTES, len(self._mapping) - begin)
        try:
            try:
                self._mapping.madvise(_POPULATE_WRITE, begin, size)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Before Linux 5.14. This takes them too, but one writer after the other.
                os.posix_fallocate(self._descriptor, self._start + begin, size)
        except OSError as error:
            raise _told(error, self._start + begin, self._start + len(self._mapping)) from None


def read_place(descriptor: int, start: int, size: int) -> Buffer:
    """A file's bytes, without copying them. Writing to them changes only this view."""
    if size <= SMALL_BYTES:
        return os.pread(descriptor, size, start)
    return memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY, offset=start))


@runtime_checkable
class Publishing(Protocol):
    """A trainer in another process, which may write its adapter to the run's store itself."""

    def published(self, version: int, *, is_kept: bool) -> AdapterFiles | None:
        """The published files; None if it has no access to the store, and then `publish` returns the bytes."""


def publishable(trainer: Trainer, version: int, *, is_kept: bool = True) -> AdapterFiles:
    """The trainer's current adapter, in memory that its processes and servers on this machine can share.

    Args: is_kept: it becomes an adapter of the run; False if it is only inspected.
    """
    stored = trainer.published(version, is_kept=is_kept) if isinstance(trainer, Publishing) else None
    if stored is not None:
        return stored
    buffer = AdapterBuffer()
    manifest = trainer.publish(buffer)
    return AdapterFiles(version, buffer.files(), manifest.digest, manifest.files, buffer)


def shared(adapter: AdapterFiles) -> AdapterMemory:
    """The adapter's memory; created now if the adapter is in ordinary bytes."""
    if adapter.memory is not None:
        return adapter.memory
    buffer = AdapterBuffer()
    for name, data in adapter.files.items():
        view = memoryview(data)
        buffer.write(name, view.nbytes, cut(view))
    buffer.seal()
    return buffer


def _open_memory() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"orbit-adapter-{secrets.token_hex(8)}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _seal(descriptor: int) -> None:
    """Prevents writes and changes of size, if the system supports it."""
    if hasattr(fcntl, "F_ADD_SEALS"):
        fcntl.fcntl(
            descriptor, fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE,
        )  # fmt: skip
