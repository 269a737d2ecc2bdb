"""Digests of gigabytes: SHA-256 over pieces, in parallel, and one digest over the pieces' digests.

A file is cut into *pieces* where its content is: a safetensors file into its header and the bytes of each tensor in the
order of the file, each cut again into runs of at most `PIECE_BYTES`. Anything else is one such run after the other. The
pieces follow each other without gaps. The digest of a set of files is `tree:<hex>`, the SHA-256 of this text:

    orbit-tree-1
    <name of the file>                    files sorted by name
    <bytes> <SHA-256 of the piece, hex>   its pieces in order

So one pass over the bytes gives the digest of each tensor, of each file and of the whole, and who holds a part of them
can be checked by hashes alone.

Belongs here: cutting bytes, hashing, the tree. Does not belong here: where tensors lie in a file (`adapters`).
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Buffer, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import chain

PIECE_BYTES = 1 << 24
"""Part of the format: another value gives other digests."""
SCHEME = "tree:"
"""Begins every digest made here."""
_BATCH_BYTES = 1 << 20
"""Small pieces are handed to another thread together: handing one over takes as long as hashing 30 KiB."""
IN_FLIGHT_BYTES = 2 * PIECE_BYTES
"""Most bytes that wait to be hashed, if a piece is not larger."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Example: `Piece(16384, "9f86d081…")`."""

    bytes: int
    sha256: str

    def __reduce__(self) -> tuple[type[Piece], tuple[int, str]]:
        # Ranks send one for each tensor, 140,000 of a large model's experts; a frozen dataclass's own way takes more
        # than twice as long.
        return Piece, (self.bytes, self.sha256)


Pieces = tuple[Piece, ...]


class PieceHasher:
    """Hashes pieces as they go by, beside whoever produces them; for one thread.

    A piece that was added must not change until `result`, or until as many bytes again were added. What waits to be
    hashed is at most two pieces of the largest size, or what is given.
    """

    def __init__(self, in_flight_bytes: int = IN_FLIGHT_BYTES) -> None:
        self._in_flight_bytes = in_flight_bytes
        self._found: list[list[Piece] | Future[list[Piece]]] = []
        self._waiting: deque[tuple[Future[list[Piece]], int]] = deque()
        self._waiting_bytes = 0
        self._batch: list[memoryview] = []
        self._batch_bytes = 0

    def add(self, data: Buffer) -> None:
        view = memoryview(data)
        self._batch.append(view)
        self._batch_bytes += view.nbytes
        if self._batch_bytes >= _BATCH_BYTES:
            self._submit()

    def _submit(self) -> None:
        size = self._batch_bytes
        while self._waiting and self._waiting_bytes + size > self._in_flight_bytes:
            future, done = self._waiting.popleft()
            future.result()
            self._waiting_bytes -= done
        future = _pool().submit(_hash_all, self._batch)
        self._found.append(future)
        self._waiting.append((future, size))
        self._waiting_bytes += size
        self._batch, self._batch_bytes = [], 0

    def result(self) -> Pieces:
        # The last of them here: short files need no other thread.
        self._found.append(_hash_all(self._batch))
        self._batch, self._batch_bytes = [], 0
        return tuple(chain.from_iterable(each.result() if isinstance(each, Future) else each for each in self._found))


def cut(data: Buffer, sizes: Iterable[int] | None = None) -> Iterator[memoryview]:
    """`data` as runs of at most `PIECE_BYTES`.

    Args:
        sizes: of its parts, each of which is cut by itself; they add up to the whole.
    """
    view = memoryview(data).cast("B")
    position = 0
    for size in (view.nbytes,) if sizes is None else sizes:
        for start in range(position, position + size, PIECE_BYTES):
            yield view[start : min(start + PIECE_BYTES, position + size)]
        position += size
    assert position == view.nbytes, "the parts do not add up"


def hash_pieces(pieces: Iterable[Buffer]) -> Pieces:
    """Hashes in parallel; the order is kept."""
    hasher = PieceHasher()
    for each in pieces:
        hasher.add(each)
    return hasher.result()


def first_difference(data: Buffer, expected: Sequence[Piece]) -> int | None:
    """Index of the first piece that `data`, cut in these sizes, does not hold; None where it holds them all."""
    view = memoryview(data).cast("B")
    if view.nbytes != sum(piece.bytes for piece in expected):
        return 0
    found = hash_pieces(split(view, expected))
    return next((index for index, piece in enumerate(expected) if found[index] != piece), None)


def split(data: Buffer, pieces: Iterable[Piece]) -> Iterator[memoryview]:
    """`data` in runs of these sizes."""
    view, position = memoryview(data).cast("B"), 0
    for piece in pieces:
        yield view[position : position + piece.bytes]
        position += piece.bytes


def tree_digest(files: Mapping[str, Iterable[Piece]]) -> str:
    """`tree:<hex>` of files by name; see the top of this file."""
    digest = hashlib.sha256(b"orbit-tree-1\n")
    for name in sorted(files):
        lines = "".join(f"{piece.bytes} {piece.sha256}\n" for piece in files[name])
        digest.update(f"{name}\n{lines}".encode())
    return f"{SCHEME}{digest.hexdigest()}"


def _hash_all(batch: Iterable[memoryview]) -> list[Piece]:
    return [Piece(view.nbytes, hashlib.sha256(view).hexdigest()) for view in batch]


@cache
def _pool() -> ThreadPoolExecutor:
    """hashlib lets other threads run meanwhile."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="orbit-hash")
