"""How much of an adapter's effect a noisy engine shows: all of it, none, twice as much, or too little to tell.

Two engines never give the same log-probs to the bit, on a GPU not even one engine twice. A fixed limit is therefore
either blind (the adapter's effect is smaller than it) or cries wolf. So the trainer's effect on the canary's tokens,
c_T, is the regressor, the engine's e_T the observation: `e = s c + n`, with noise n of `sigma` per token. Least squares
through the origin gives `s = <c, e> / <c, c>` with standard error `sigma / |c|` (e.g. Greene, "Econometric Analysis",
4.3). Healthy is s = 1; an adapter that is not applied gives 0, one that is scaled twice gives 2, and with the change
since an older version as c, an engine that still samples from that one gives 0.

What is left, `r = e - c`, is noise where the engine applies all of the adapter and nothing else. A fault in a part of
it hardly moves s and shows in the energy of r: see `unexplained`.

Belongs here: this arithmetic, in plain floats. Does not belong here: readings and what follows from them (`liveness`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DEVIATIONS = 6.0
"""Standard errors within which s counts as 1. Under normal noise a healthy publish leaves them once in 5e8; the noise
of log-probs has heavier tails, but s is a sum over the canary's tokens."""
RESOLVED = 0.5
"""Widest margin around 1 at which 0 and 2 are still told apart from it, each with a margin of its own."""
SMALLEST_MARGIN = 0.1
"""Two implementations round the adapter's product differently, which is no noise between tokens."""
EXCESS_KURTOSIS = 12.0
"""Of one token's noise. That of a mixture in which every tenth token is four times as noisy is 9.7; 0 were normal."""
LARGEST_IN_NOISE = 12.0
"""Times the noise that a single token may differ by. Log-probs of rare tokens differ far more than the rest."""


@dataclass(frozen=True)
class Effect:
    """What an engine shows of the change that is expected of it."""

    scale: float
    """s; NaN where nothing is expected."""
    margin: float
    """How far from 1 it may be; infinite where nothing is expected."""

    @property
    def is_resolved(self) -> bool:
        """None of it, all of it and twice as much can be told apart."""
        return self.margin <= RESOLVED

    @property
    def agrees(self) -> bool:
        """Where it is resolved: the engine shows what is expected. A NaN does not agree."""
        return abs(self.scale - 1.0) <= self.margin


def noise_of(*differences_T: Sequence[float]) -> float:
    """Standard deviation per token of one *change* (a difference of two readings), in nat.

    Args:
        differences_T: each the differences of two readings that should be equal: trainer's and engine's of the bare
            base, the engine's of now and of the publish before, behind a cache and computed anew. The largest counts:
            they hold different sources of noise, and none may be taken for an effect.
    """
    sizes = [math.sqrt(math.fsum(x * x for x in each) / len(each)) for each in differences_T if each]
    # A change subtracts two readings, each with noise of its own; one such difference has that already.
    return math.nan if any(math.isnan(x) for x in sizes) else math.sqrt(2.0) * max(sizes, default=0.0)


def weigh(expected_T: Sequence[float], found_T: Sequence[float], noise: float) -> Effect:
    """Example: `weigh([0.1, -0.2], [0.1, -0.2], 0.0)` is `Effect(scale=1.0, margin=0.1)`."""
    energy = math.fsum(c * c for c in expected_T)
    if energy == 0.0:
        return Effect(math.nan, math.inf)
    scale = math.fsum(c * e for c, e in zip(expected_T, found_T, strict=True)) / energy
    # Noise in the regressor itself draws s towards 0, by its share of the energy at most (Greene, 8.5).
    drawn = len(expected_T) * noise * noise / energy
    return Effect(scale, max(SMALLEST_MARGIN, DEVIATIONS * noise / math.sqrt(energy) + drawn))


def unexplained(expected_T: Sequence[float], found_T: Sequence[float], noise: float) -> float:
    """Root mean square of `found - expected` in that of what may be; above 1 it holds more than noise.

    `sum(r^2)` of n tokens has mean `n noise^2` and variance `n noise^4 (2 + k)` for an excess kurtosis k (e.g. Mood,
    Graybill, Boes, "Introduction to the Theory of Statistics", VI.2, theorem 2), and the noise was itself estimated
    from as many tokens. `SMALLEST_MARGIN` of the expected change may be rounded differently.
    """
    left = math.fsum((e - c) ** 2 for c, e in zip(expected_T, found_T, strict=True))
    if left == 0.0:
        return 0.0
    n = len(expected_T)
    spread = DEVIATIONS * math.sqrt(2.0 * (2.0 + EXCESS_KURTOSIS) / n)
    allowed = n * noise * noise * (1.0 + spread) + SMALLEST_MARGIN**2 * math.fsum(c * c for c in expected_T)
    return math.sqrt(left / allowed) if allowed else math.inf
