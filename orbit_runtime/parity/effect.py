"""Measures how much of an adapter's effect a noisy engine shows: all of it, none, twice as much, or too little to tell.

Two engines never give bit-identical log-probs, and on a GPU not even one engine does so twice. A fixed limit is
therefore either blind (if the adapter's effect is smaller) or raises false alarms. So the trainer's effect on the
canary's tokens, c_T, is the regressor and the engine's effect, e_T, the observation: `e = s c + n`, with noise n of
`sigma` per token. Least squares through the origin gives `s = <c, e> / <c, c>` with standard error `sigma / |c|` (e.g.
Greene, "Econometric Analysis", 4.3). A healthy engine has s = 1; an adapter that is not applied gives 0, one that is
scaled twice gives 2; and if c is the change since an older version, an engine that still samples from that one gives 0.

The residual, `r = e - c`, is noise if the engine applies the whole adapter and nothing else. A fault in one part of it
barely changes s but shows in the energy of r: see `unexplained`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DEVIATIONS = 6.0
"""Number of standard errors within which s counts as 1. Under normal noise a healthy publish exceeds them once in 5e8;
the noise of log-probs has heavier tails, but s is a sum over the canary's tokens."""
RESOLVED = 0.5
"""Widest margin around 1 at which 0 and 2, each with the same margin, are still distinct from 1."""
SMALLEST_MARGIN = 0.1
"""Two implementations round the adapter's product differently, and that is not noise between tokens."""
EXCESS_KURTOSIS = 12.0
"""Excess kurtosis of one token's noise. A mixture in which every tenth token is four times as noisy has 9.7; a normal
distribution has 0."""
LARGEST_IN_NOISE = 12.0
"""Largest difference of a single token, as a multiple of the noise. Log-probs of rare tokens differ far more."""


@dataclass(frozen=True)
class Effect:
    """How much of the expected change an engine shows."""

    scale: float
    """s; NaN if no change is expected."""
    margin: float
    """Largest distance of s from 1; infinite if no change is expected."""

    @property
    def is_resolved(self) -> bool:
        """Whether none of the change, all of it and twice as much can be told apart."""
        return self.margin <= RESOLVED

    @property
    def agrees(self) -> bool:
        """Whether the engine shows the expected change, given that it is resolved. A NaN does not agree."""
        return abs(self.scale - 1.0) <= self.margin


def noise_of(*differences_T: Sequence[float]) -> float:
    """Standard deviation per token of one *change* (a difference of two readings), in nat.

    Args:
        differences_T: differences of readings that should be equal: the trainer's and the engine's of the bare base;
            the engine's now and at the previous publish; after a cached prefix and recomputed. The largest counts:
            they contain different sources of noise, and none of them may be mistaken for an effect.
    """
    sizes = [math.sqrt(math.fsum(x * x for x in each) / len(each)) for each in differences_T if each]
    # A change subtracts two readings, each with its own noise; one such difference already contains both.
    return math.nan if any(math.isnan(x) for x in sizes) else math.sqrt(2.0) * max(sizes, default=0.0)


def weigh(expected_T: Sequence[float], found_T: Sequence[float], noise: float) -> Effect:
    """Example: `weigh([0.1, -0.2], [0.1, -0.2], 0.0)` is `Effect(scale=1.0, margin=0.1)`."""
    energy = math.fsum(c * c for c in expected_T)
    if energy == 0.0:
        return Effect(math.nan, math.inf)
    scale = math.fsum(c * e for c, e in zip(expected_T, found_T, strict=True)) / energy
    # Noise in the regressor itself draws s towards 0, at most by its share of the energy (Greene, 8.5).
    drawn = len(expected_T) * noise * noise / energy
    return Effect(scale, max(SMALLEST_MARGIN, DEVIATIONS * noise / math.sqrt(energy) + drawn))


def unexplained(expected_T: Sequence[float], found_T: Sequence[float], noise: float) -> float:
    """Root mean square of `found - expected`, relative to its allowed value; above 1 it contains more than noise.

    `sum(r^2)` of n tokens has mean `n noise^2` and variance `n noise^4 (2 + k)` for an excess kurtosis k (e.g. Mood,
    Graybill, Boes, "Introduction to the Theory of Statistics", VI.2, theorem 2), and the noise itself was estimated
    from as many tokens. A fraction `SMALLEST_MARGIN` of the expected change may be due to rounding.
    """
    left = math.fsum((e - c) ** 2 for c, e in zip(expected_T, found_T, strict=True))
    if left == 0.0:
        return 0.0
    n = len(expected_T)
    spread = DEVIATIONS * math.sqrt(2.0 * (2.0 + EXCESS_KURTOSIS) / n)
    allowed = n * noise * noise * (1.0 + spread) + SMALLEST_MARGIN**2 * math.fsum(c * c for c in expected_T)
    return math.sqrt(left / allowed) if allowed else math.inf
