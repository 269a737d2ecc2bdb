"""Deadlines: how long a run may compute or wait for a place, and how long an attempt may take to start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orbit_operator.facts import Attempt, Lifecycle, RecordedStatus

STARTING_PHASES = frozenset({"", "Starting", "Preflight"})


def active_seconds(attempts: Sequence[Attempt], retired: Mapping[str, float], now: float) -> float:
    """Seconds so far for which attempts held GPUs: from a pod's placement on a node to its end."""
    return retired.get("seconds", 0.0) + sum(held_seconds(attempt, now) for attempt in attempts)


def held_seconds(attempt: Attempt, now: float) -> float:
    """Seconds for which an attempt has held its GPUs."""
    if attempt.scheduled is None:
        return attempt.earlier_seconds
    end = attempt.ended if attempt.ended is not None else now
    return attempt.earlier_seconds + max(0.0, end - attempt.scheduled)


def active_deadline(
    attempts: Sequence[Attempt], retired: Mapping[str, float], limit: int | None, now: float
) -> float | None:
    """When the run's time is used up if the current attempt continues; `None` without a limit or while nothing runs."""
    if limit is None:
        return None
    left = limit - active_seconds(attempts, retired, now)
    holds = any(attempt.scheduled is not None and attempt.ended is None for attempt in attempts)
    return now + left if holds or left <= 0 else None


def waiting_deadline(
    attempts: Sequence[Attempt], stored: RecordedStatus, limit: int | None, now: float
) -> float | None:
    """When the run's pod must be on a node; `None` without a limit, or once it is. Each attempt waits anew."""
    current = attempts[-1] if attempts else None
    if limit is None:
        return None
    if current is not None and current.scheduled is not None and not (current.is_over and current in stored.attempts):
        # If it ended meanwhile, the stored condition is still the one from before its placement.
        return None
    placed = stored.conditions.get("PodScheduled")
    return limit + (placed.since if placed is not None and placed.status == "False" else now)


def startup_deadline(attempt: Attempt, lifecycle: Lifecycle) -> float | None:
    """When this attempt must have begun to train; `None` without a limit, or once it has begun.

    A running container that never answered is left alone: a blocked network must not end a healthy run.
    """
    if lifecycle.startup_deadline_seconds is None or attempt.scheduled is None or attempt.running is not None:
        return None
    if attempt.started is not None and attempt.answered is None:
        return None
    return attempt.scheduled + lifecycle.startup_deadline_seconds
