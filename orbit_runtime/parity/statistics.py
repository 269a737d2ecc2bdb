"""Statistics of `d = logp_trainer - logp_sampler`, and the limit that they must keep.

Belongs here: plain numbers. Does not belong here: tensors, models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

ABSOLUTE_LIMITS = {"BF16": 0.01, "FP8": 0.02, "INT4": 0.02, "NVFP4": 0.02, "MXFP4": 0.02}
"""Largest mean |d| that a precision may show, whatever its floor: above it something is structurally different."""
SMALLEST_LIMIT = 1e-4
"""A floor can be exactly 0; differences below this carry no information about the policy in any precision."""


def absolute_limit(precision: str, asked: float | None) -> float:
    """Args: asked: the manifest's own; None: the precision's."""
    return ABSOLUTE_LIMITS[precision] if asked is None else asked


def base_limit(precision: str, asked: float | None) -> float:
    """Largest mean |d| with no adapter that may still be the same base; a narrower `asked` is the gate's to enforce."""
    return max(ABSOLUTE_LIMITS[precision], asked or 0.0)


@dataclass(frozen=True)
class Difference:
    """Two sides on the same tokens."""

    mean: float
    p50: float
    p99: float
    max: float
    k3: float
    """Mean of exp(d) - 1 - d: Schulman's k3 estimate of the KL divergence."""
    outside: float
    """Share of tokens whose probability ratio lies outside [0.9, 1.1]."""
    tokens: int

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def build_difference(trainer_T: Sequence[float], sampler_T: Sequence[float]) -> Difference:
    """Example: `build_difference([0.0, -1.0], [0.0, -1.5]).mean == 0.25`."""
    d = [a - b for a, b in zip(trainer_T, sampler_T, strict=True)]
    if not d:
        return Difference(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
    size = sorted(abs(x) for x in d)
    k3 = [math.expm1(x) - x for x in (max(-10.0, min(10.0, x)) for x in d)]
    outside = sum(1 for x in d if not math.log(0.9) <= x <= math.log(1.1))
    return Difference(
        mean=math.fsum(size) / len(size),
        p50=_quantile(size, 0.5),
        p99=_quantile(size, 0.99),
        max=size[-1],
        k3=math.fsum(k3) / len(k3),
        outside=outside / len(d),
        tokens=len(d),
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def resolve_limit(floor: float, *, factor: float, absolute: float) -> float:
    """`min(absolute, max(factor * floor, SMALLEST_LIMIT))`."""
    return min(absolute, max(factor * floor, SMALLEST_LIMIT))
