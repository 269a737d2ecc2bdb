"""Times as the API writes them (`2026-03-01T12:00:00Z`) and as we compute with them (seconds since the epoch)."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache

REMEMBERED = 4096
"""Number of formatted times cached: statuses repeat their times, and formatting them would cost more than all else."""


def format_time(seconds: float) -> str:
    """Whole seconds, as `metav1.Time` has them."""
    return _format(int(seconds))


def format_micro_time(seconds: float) -> str:
    """Microseconds, as `metav1.MicroTime` has them."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@lru_cache(REMEMBERED)
def _format(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def read_time(text: object) -> float | None:
    """`None` for anything that is not a time."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
