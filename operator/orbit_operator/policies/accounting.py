"""Splits the GPU time of an attempt into useful, lost and waiting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orbit_operator.facts import Attempt


@dataclass(frozen=True, slots=True)
class GPUSeconds:
    """Seconds times GPUs. Example: 8 GPUs, 60 s of loading, 600 s of training of which a crash lost the last 30:
    `GPUSeconds(useful=4560, lost=240, waiting=480)`."""

    useful: float = 0.0
    lost: float = 0.0
    waiting: float = 0.0

    def __add__(self, other: GPUSeconds) -> GPUSeconds:
        return GPUSeconds(self.useful + other.useful, self.lost + other.lost, self.waiting + other.waiting)


def account(attempt: Attempt, gpus: int, now: float) -> GPUSeconds:
    """Accounts for one attempt. While it lives, its training counts as useful; what a crash undoes becomes lost."""
    useful = attempt.earlier_seconds
    if attempt.scheduled is None:
        return GPUSeconds(useful=gpus * useful)
    end = max(attempt.scheduled, attempt.ended if attempt.ended is not None else now)
    began = end if attempt.running is None else min(end, max(attempt.scheduled, attempt.running))
    lost = 0.0
    if attempt.verdict is not None and attempt.verdict.result == "Failed":
        kept = min(end, max(began, attempt.checkpoint_at if attempt.checkpoint_at is not None else began))
        lost = end - kept
    useful += end - began - lost
    return GPUSeconds(gpus * useful, gpus * lost, gpus * (began - attempt.scheduled))


def account_all(attempts: Iterable[Attempt], retired: Mapping[str, float], gpus: int, now: float) -> GPUSeconds:
    """Accounts for all attempts, including those no longer listed."""
    total = GPUSeconds(*(retired.get(name, 0.0) for name in ("useful", "lost", "waiting")))
    for attempt in attempts:
        total += account(attempt, gpus, now)
    return total
