"""Scores of a policy on prompts, with intervals.

The unit is the prompt: samples of one prompt are correlated, so the spread is that of the prompts' means (clustered
standard errors), and two policies are compared prompt by prompt (Miller 2024, arXiv:2411.00640, sections 2.2 and 4.2).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

CONFIDENCE = 0.95
Z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
FEWEST_EQUAL = 6
"""Prompts that differ equally show a difference from this number on: by chance all have one sign in 2 of 2^6 cases (the
sign test)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts.

    Example: `Estimate(0.5, 0.31, 0.69, 100)`
    """

    mean: float | None
    """None if no prompt has a score."""
    low: float | None
    """Lower end of the 95 % interval; None if there is only one prompt, and so no spread."""
    high: float | None
    prompts: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """One policy minus another, on the prompts for which both have a score."""

    difference: Estimate
    better: int
    """Number of prompts with a positive difference."""
    worse: int

    @property
    def verdict(self) -> str:
        low, high = self.difference.low, self.difference.high
        if low is None or high is None or low <= 0 <= high or (low == high and self.difference.prompts < FEWEST_EQUAL):
            return "no difference shown"
        return "better" if low > 0 else "worse"

    def to_json(self) -> dict[str, Any]:
        return {**self.difference.to_json(), "better": self.better, "worse": self.worse, "verdict": self.verdict}


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Chance that at least one of `k` samples passes, estimated without bias from `samples` of which `passed` did.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, equation 1), as their product, which does not
    overflow. Needs `k <= samples`.

    Example: `pass_at_k(4, 1, 2)` is 0.5.
    """
    assert 1 <= k <= samples
    if samples - passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / each for each in range(samples - passed + 1, samples + 1))


def estimate(values_P: Sequence[float]) -> Estimate:
    """Mean of the prompts' scores, and its 95 % interval: the normal interval of a mean of independent prompts.

    If all scores are 0, or all 1, that interval would be a point, which claims too much: the exact interval of a
    proportion is given instead (Clopper and Pearson 1934). For scores within [0, 1], the interval is too.
    """
    count = len(values_P)
    if not count:
        return Estimate(None, None, None, 0)
    mean = math.fsum(values_P) / count
    if count == 1:
        return Estimate(mean, None, None, 1)
    if set(values_P) in ({0.0}, {1.0}):
        far = ((1 - CONFIDENCE) / 2) ** (1 / count)
        return Estimate(mean, 0.0, 1 - far, count) if mean == 0 else Estimate(mean, far, 1.0, count)
    half = Z * statistics.stdev(values_P, mean) / math.sqrt(count)
    low, high = mean - half, mean + half
    if all(0 <= value <= 1 for value in values_P):
        low, high = max(0.0, low), min(1.0, high)
    return Estimate(mean, low, high, count)


def paired(first: Mapping[str, float], second: Mapping[str, float]) -> PairedDifference:
    """`second` minus `first`, prompt by prompt.

    If every prompt has the same difference, the interval is a point, which tells nothing about other prompts. For
    scores within [0, 1], the interval is within [-1, 1].
    """
    pairs = [(first[prompt], second[prompt]) for prompt in first if prompt in second]
    differences = [after - before for before, after in pairs]
    count = len(differences)
    better, worse = sum(each > 0 for each in differences), sum(each < 0 for each in differences)
    if not count:
        return PairedDifference(Estimate(None, None, None, 0), 0, 0)
    mean = math.fsum(differences) / count
    if count == 1:
        return PairedDifference(Estimate(mean, None, None, 1), better, worse)
    half = Z * statistics.stdev(differences, mean) / math.sqrt(count)
    low, high = mean - half, mean + half
    if all(0 <= value <= 1 for pair in pairs for value in pair):
        low, high = max(-1.0, low), min(1.0, high)
    return PairedDifference(Estimate(mean, low, high, count), better, worse)


def pass_ks(samples: int) -> tuple[int, ...]:
    """The reported values of k: powers of two, and the number of samples itself.

    Example: for 6 samples `(1, 2, 4, 6)`.
    """
    powers = [2**power for power in range(samples.bit_length()) if 2**power <= samples]
    return tuple(dict.fromkeys([*powers, samples]))
