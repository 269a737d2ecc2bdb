"""Rows by number, read on access: a file of a hundred gigabytes is never in memory.

Belongs here: random access. Does not belong here: what a row must hold (`rows`), the first pass over a file
(`readers`).
"""

from __future__ import annotations

import json
import os
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import IO, Any, Protocol

from orbit_runtime.errors import DataError

BLOCK = 16
"""Rows between index entries: a hundred million rows take 100 MB, and finding a row reads eight on average."""
HELD_BYTES = 1 << 28
"""Bytes of decoded row groups kept for later rows."""
OFFSETS, SIZES = "Q", "I"
"""Type codes of arrays."""

Row = Mapping[str, Any]


class RowStore(Protocol):
    """Rows of one source. Safe to read from several threads."""

    def __len__(self) -> int: ...

    def bound(self, number: int) -> int:
        """Upper bound of the row's bytes as JSON, and so of any text in it."""

    def read(self, number: int) -> Row: ...

    def place(self, number: int) -> str:
        """The row's place, for the user, such as `line 7`."""


class UnchangedFile:
    """Checks that an open file is unchanged: a replacement is not read, and a file that was written to is refused."""

    def __init__(self, file: IO[bytes], where: str) -> None:
        self._file, self._where = file, where
        self._stamp = self._now()

    def check(self) -> None:
        if self._now() != self._stamp:
            raise DataError(
                "the file was changed while the run reads from it",
                where=self._where,
                fix="restore it and start again: the run continues from its checkpoint",
            )

    def _now(self) -> tuple[int, int]:
        stat = os.fstat(self._file.fileno())
        return stat.st_size, stat.st_mtime_ns


class Lines:
    """Lines of JSON in a file: the index holds the place of every sixteenth; others are counted from there."""

    def __init__(
        self,
        file: IO[bytes],
        *,
        count: int,
        offsets: array[int],
        lines: array[int],
        longest: array[int],
        unit: str = "line",
        unchanged: UnchangedFile | None = None,
    ) -> None:
        """
        Args:
            offsets, lines: byte offset and line number, from 1, of the first line of every `BLOCK` non-blank lines.
            longest: bytes of the longest line of each block.
            unit: what the user counts in the original file; if these lines were derived from it, its rows.
        """
        self._file, self._count, self._offsets, self._lines = file, count, offsets, lines
        self._longest = longest
        self._unit, self._unchanged = unit, unchanged
        self._lock = threading.Lock()
        self._next, self._next_line = -1, 0
        """The row at the file's position, and its line or the line of a blank line before it."""

    def __len__(self) -> int:
        return self._count

    def bound(self, number: int) -> int:
        return self._longest[number // BLOCK]

    def read(self, number: int) -> Row:
        row: Row = json.loads(self._find(number)[1])
        return row

    def place(self, number: int) -> str:
        return f"{self._unit} {self._find(number)[0] if self._unit == 'line' else number + 1}"

    def _find(self, number: int) -> tuple[int, bytes]:
        """The number of the row's line, and the line."""
        with self._lock:
            if self._unchanged:
                self._unchanged.check()
            if number != self._next:
                block = number // BLOCK
                self._file.seek(self._offsets[block])
                self._next, self._next_line = block * BLOCK, self._lines[block]
            while True:
                line, at = self._file.readline(), self._next_line
                assert line, "the index names a line that is not there"
                self._next_line += 1
                if line.isspace():
                    continue
                self._next += 1
                if self._next == number + 1:
                    return at, line


class Batches:
    """Rows of Arrow's record batches or of Parquet's row groups; those of `HELD_BYTES` stay decoded."""

    def __init__(
        self,
        load: Callable[[int], Any],
        counts: Sequence[int],
        longest: array[int],
        unchanged: UnchangedFile | None = None,
    ) -> None:
        """
        Args:
            load: decodes the batch with a given number.
            counts: rows of each batch.
        """
        self._load, self._ends, self._unchanged = load, list(accumulate(counts)), unchanged
        self._longest = longest
        self._held: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def bound(self, number: int) -> int:
        return self._longest[number // BLOCK]

    def read(self, number: int) -> Row:
        batch = bisect_right(self._ends, number)
        start = self._ends[batch - 1] if batch else 0
        with self._lock:
            decoded = self._held.get(batch)
            if decoded is None:
                if self._unchanged:
                    self._unchanged.check()
                decoded = self._load(batch)
                self._held[batch] = decoded
            self._held.move_to_end(batch)
            while len(self._held) > 1 and sum(each.nbytes for each in self._held.values()) > HELD_BYTES:
                self._held.popitem(last=False)
            (row,) = decoded.slice(number - start, 1).to_pylist()
        return without_nulls(row)

    def place(self, number: int) -> str:
        return f"row {number + 1}"


class Shards:
    """Rows of several files, one after another."""

    def __init__(self, stores: Sequence[RowStore], names: Sequence[str]) -> None:
        self._stores, self._names = stores, names
        self._ends = list(accumulate(map(len, stores)))

    def __len__(self) -> int:
        return self._ends[-1]

    def bound(self, number: int) -> int:
        shard, within = self._find(number)
        return self._stores[shard].bound(within)

    def read(self, number: int) -> Row:
        shard, within = self._find(number)
        return self._stores[shard].read(within)

    def place(self, number: int) -> str:
        shard, within = self._find(number)
        return f"{self._names[shard]} {self._stores[shard].place(within)}"

    def _find(self, number: int) -> tuple[int, int]:
        shard = bisect_right(self._ends, number)
        return shard, number - (self._ends[shard - 1] if shard else 0)


def without_nulls(row: Row) -> Row:
    """The row as in JSON lines: in Arrow, all messages of a column have the same keys, with null for missing ones."""
    return {key: _trimmed(value) for key, value in row.items()}


def _trimmed(value: Any) -> Any:
    if not (isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]):
        return value
    return [
        {key: each for key, each in message.items() if each is not None or key == "content"}
        if isinstance(message, dict) else message
        for message in value
    ]  # fmt: skip
