"""Divides a pass's tokens among the processes that compute it together."""

from __future__ import annotations

ProcessIndex = tuple[int, int]
"""A process's index among several, and their number."""


def own_tokens(num_tokens: int, context: ProcessIndex) -> tuple[range, range]:
    """Two runs, one from each end: a late token sees more keys than an early one, so this balances the work.

    `num_tokens` is a multiple of twice the number of processes.

    Example: `own_tokens(8, (0, 2)) == (range(0, 2), range(6, 8))`.
    """
    place, count = context
    size = num_tokens // (2 * count)
    mirrored = 2 * count - 1 - place
    return range(place * size, (place + 1) * size), range(mirrored * size, (mirrored + 1) * size)
