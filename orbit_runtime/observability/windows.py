"""The reward or held-out loss at one end of a run, as a mean over several steps with its standard error.

The reward R of k steps is the mean of their `reward_mean`. Its standard error is the larger of two estimates, so that
neither few samples nor differing prompts are overlooked:

    between steps   s / sqrt(k)                   s: sample standard deviation of the k step means
    within steps    sqrt(sum(std_i^2 / n_i)) / k  std_i, n_i: reward_std and scored samples of step i

For a held-out loss, k counts the last measurements, and the error is only that between them: a single one has none.

The margin of a difference is t(0.975, df) * sqrt(se_a^2 + se_b^2), df by Welch and Satterthwaite with k - 1 each (Welch
1947).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orbit_runtime.observability.metrics import MetricsRow

# Two-sided 95 % quantiles of Student's t. Between two entries the lower df is taken, which is the wider margin.
_T975 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 12: 2.179,
    14: 2.145, 16: 2.120, 18: 2.101, 20: 2.086, 25: 2.060, 30: 2.042, 40: 2.021, 60: 2.000, 120: 1.980,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Window:
    """The reward of consecutive steps, or the held-out loss."""

    value: float | None
    standard_error: float | None
    """`None` if there is only one step."""
    steps: int
    """k."""


@dataclass(frozen=True, slots=True)
class Gain:
    """The difference between a run's end and its beginning."""

    first: Window
    last: Window
    difference: float
    margin: float | None
    """Half the width of the 95 % interval; None if the windows have fewer than three steps."""

    @property
    def verdict(self) -> str:
        if self.margin is None:
            return "too little data"
        if abs(self.difference) <= self.margin:
            return "no difference beyond the margin"
        return "better" if self.difference > 0 else "worse"

    def to_json(self) -> dict[str, Any]:
        return {
            "first": self.first.value,
            "last": self.last.value,
            "steps": self.last.steps,
            "difference": self.difference,
            "margin": self.margin,
            "verdict": self.verdict,
        }


def window_steps(steps: int) -> int:
    """k for a run with this many steps: a fifth of them, between 3 and 20."""
    return min(steps, 20, max(3, steps // 5))


def build_gain(rows: Sequence[MetricsRow]) -> Gain | None:
    """Compares the last window with the first; they share no step. None for fewer than two steps with a reward."""
    scored = [row for row in rows if row.number("reward_mean") is not None]
    if len(scored) < 2:
        return None
    k = min(window_steps(len(scored)), len(scored) // 2)
    first, last = final_reward(scored[:k], k), final_reward(scored, k)
    assert first.value is not None
    assert last.value is not None
    return Gain(first, last, last.value - first.value, noise_margin(first, last) if k >= 3 else None)


def final_reward(rows: Sequence[MetricsRow], k: int) -> Window:
    """Mean of the last `k` steps' rewards and its standard error."""
    shown = [row for row in rows[-k:] if k > 0 and row.number("reward_mean") is not None]
    means = [row.number("reward_mean") or 0.0 for row in shown]
    if not means:
        return Window(None, None, 0)
    if len(means) < 2:
        return Window(means[0], None, 1)
    between = statistics.stdev(means) / math.sqrt(len(means))
    return Window(statistics.fmean(means), max(between, _within(shown)), len(means))


def final_loss(rows: Sequence[MetricsRow], k: int) -> Window:
    """Mean of the last `k` measurements of the held-out loss, and its standard error."""
    losses = held_out_losses(rows)[-k:] if k > 0 else []
    if len(losses) < 2:
        return Window(losses[0] if losses else None, None, len(losses))
    return Window(statistics.fmean(losses), statistics.stdev(losses) / math.sqrt(len(losses)), len(losses))


def held_out_losses(rows: Sequence[MetricsRow]) -> list[float]:
    """Held-out losses of the steps that measured them."""
    return [loss for row in rows if (loss := row.number("validation_loss")) is not None]


def _within(rows: Sequence[MetricsRow]) -> float:
    variance = 0.0
    for row in rows:
        samples = (row.number("reward_value") or 0.0) + (row.number("reward_wrong") or 0.0)
        if samples:
            variance += (row.number("reward_std") or 0.0) ** 2 / samples
    return math.sqrt(variance) / len(rows)


def noise_margin(a: Window, b: Window) -> float | None:
    """Half the width of the 95 % interval of the difference of two windows."""
    if a.standard_error is None or b.standard_error is None:
        return None
    return welch_margin((a.standard_error, a.steps), (b.standard_error, b.steps))


def welch_margin(a: tuple[float, int], b: tuple[float, int]) -> float:
    """Args: a, b: standard error of a mean, and its number of values (2 or more)."""
    (se_a, n_a), (se_b, n_b) = a, b
    va, vb = se_a**2, se_b**2
    if va + vb == 0.0:
        return 0.0
    df = (va + vb) ** 2 / (va**2 / (n_a - 1) + vb**2 / (n_b - 1))
    return _T975[max(known for known in _T975 if known <= max(1.0, df + 1e-9))] * math.sqrt(va + vb)
