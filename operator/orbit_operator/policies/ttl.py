"""Decides when a finished run is deleted."""

from __future__ import annotations

from orbit_operator.facts import Lifecycle


def expiry(finished_at: float | None, lifecycle: Lifecycle, default: int) -> float | None:
    """When a run that ended at `finished_at` is deleted; `None` means never, as does a default below 0."""
    if finished_at is None:
        return None
    seconds = lifecycle.ttl_seconds if lifecycle.ttl_seconds is not None else default
    return None if seconds < 0 else finished_at + seconds
