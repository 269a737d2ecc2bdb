"""The time allowed for work on an adapter's bytes before the peer is given up: a minimum rate, whatever the size.

Belongs here: that rate. Does not belong here: timeouts of work without bytes (each waiting side sets its own).
"""

from __future__ import annotations

from collections.abc import Buffer, Iterable

from orbit_runtime.types import AdapterFiles

SLOWEST_BYTES_PER_SECOND = 50e6
"""For moving, hashing or parsing: a tenth of what one core of a busy machine achieves."""


def seconds_for(num_bytes: float) -> float:
    """Example: 200 s for an adapter of 10 GB."""
    return num_bytes / SLOWEST_BYTES_PER_SECOND


def adapter_bytes(adapter: AdapterFiles) -> int:
    """Size of all its files; none is read for it if their pieces are known."""
    if adapter.pieces is None:
        return total_bytes(adapter.files.values())
    return sum(piece.bytes for pieces in adapter.pieces.values() for piece in pieces)


def total_bytes(files: Iterable[Buffer]) -> int:
    return sum(memoryview(data).nbytes for data in files)
