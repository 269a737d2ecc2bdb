"""The fastest tile sizes for a weight and a number of tokens: measured once per process, then cached.

Belongs here: candidates, measuring, caching. Does not belong here: launching kernels. Every candidate sums in the same
order, so a different choice in another process should not change results; not run on hardware.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Numbers of tokens (for experts: averages) that are tuned; a number in between uses the next larger one's choice."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes of a product, and compiler options."""

    tokens: int
    rows: int
    columns: int
    num_warps: int = 4
    num_stages: int = 3


_remembered: dict[Hashable, Tiles] = {}
_log = logging.getLogger(__name__)


def tuned(
    key: Hashable, num_tokens: int, choices: Sequence[Tiles], run: Callable[[Tiles], None], *, measures: bool = True
) -> Tiles:
    """The choice for `key` and the bucket of `num_tokens`.

    Args:
        measures: if False, returns the choice that fits the number of tokens best, without running anything.
    """
    bucket = BUCKETS[min(bisect.bisect_left(BUCKETS, num_tokens), len(BUCKETS) - 1)]
    if not measures:
        return fitting(choices, bucket)
    found = _remembered.get((key, bucket))
    if found is None:
        found = _remembered[key, bucket] = quickest(candidates(choices, bucket), run, _median_ms)
        _log.debug("kernel %s, %d tokens: %s", key, bucket, found)
    return found


def fitting(choices: Sequence[Tiles], num_tokens: int) -> Tiles:
    """The first choice with the largest tile that does not exceed the number of tokens; otherwise the smallest."""
    within = [each for each in choices if each.tokens <= num_tokens]
    return max(within, key=lambda each: each.tokens) if within else min(choices, key=lambda each: each.tokens)


def candidates(choices: Sequence[Tiles], num_tokens: int) -> list[Tiles]:
    """Choices whose tile does not exceed the number of tokens, and those with the smallest tile."""
    smallest = min(each.tokens for each in choices)
    return [each for each in choices if each.tokens <= max(num_tokens, smallest)]


def quickest(
    choices: Sequence[Tiles], run: Callable[[Tiles], None], measure: Callable[[Callable[[], None]], float]
) -> Tiles:
    """The fastest choice. Choices that need more registers or shared memory than the device has are skipped."""
    times: dict[Tiles, float] = {}
    for tiles in choices:
        try:
            times[tiles] = measure(lambda tiles=tiles: run(tiles))  # type: ignore[misc]
        except Exception as error:
            if type(error).__name__ != "OutOfResources":
                raise
    assert times, "no tile size fits this device"
    return min(times, key=lambda tiles: times[tiles])


def _median_ms(function: Callable[[], None]) -> float:
    import triton.testing

    return float(triton.testing.do_bench(function, warmup=5, rep=25, return_mode="median"))
