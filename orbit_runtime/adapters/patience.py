"""How long work on an adapter's bytes may take before somebody is given up: a floor for its rate, whatever its size.

Belongs here: that rate. Does not belong here: how long anything takes that has no bytes (who waits for it says that).
"""

from __future__ import annotations

from collections.abc import Buffer, Iterable

SLOWEST_BYTES_PER_SECOND = 50e6
"""Of moving, hashing or parsing: a tenth of what one core of a busy machine does."""


def seconds_for(num_bytes: float) -> float:
    """Example: 200 s for an adapter of 10 GB."""
    return num_bytes / SLOWEST_BYTES_PER_SECOND


def total_bytes(files: Iterable[Buffer]) -> int:
    return sum(memoryview(data).nbytes for data in files)
