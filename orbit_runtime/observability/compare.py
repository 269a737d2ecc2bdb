"""Several runs beside each other, and whether one is better by more than its own noise.

Belongs here: the statistics of a comparison, written out, and when runs must not be compared.
Does not belong here: reading runs (`report`) or showing the answer (`report_html`, `cli`).

The final reward R of a run is the mean of `reward_mean` over its last k steps. Its standard error is the larger of two
estimates, so that neither few samples nor differing prompts are overlooked:

    between steps   s / sqrt(k)                 s: sample standard deviation of the k step means
    within steps    sqrt(sum(std_i^2 / n_i)) / k  std_i, n_i: reward_std and scored samples of step i

The margin of a difference is t(0.975, df) * sqrt(se_a^2 + se_b^2), df by Welch and Satterthwaite with k - 1 each (Welch
1947), or the asked margin where that is larger. Runs of one seed each: their seeds' own spread is not in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orbit_runtime.errors import UsageError
from orbit_runtime.observability.metrics import MetricsRow
from orbit_runtime.observability.report import Report

FORMULA = "t(0.975, Welch df) * sqrt(se_a^2 + se_b^2); se = max(between steps, within steps); at least --margin"
DIFFERENT_TASK = ("data.prompts", "environment", "model.maxSequenceLength")
"""Identity fields below these make another task: their rewards are not on one scale."""

# Two-sided 95 % quantiles of Student's t. Between two entries the lower df is taken, which is the wider margin.
_T975 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 12: 2.179,
    14: 2.145, 16: 2.120, 18: 2.101, 20: 2.086, 25: 2.060, 30: 2.042, 40: 2.021, 60: 2.000, 120: 1.980,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Final:
    """A run's final reward."""

    reward: float | None
    standard_error: float | None
    """`None` where one step is too little to tell."""
    steps: int
    """k."""


@dataclass(frozen=True, slots=True)
class SameLength:
    """A run and the first one after equally many steps: what the longer one trained beyond them does not count."""

    steps: int
    difference: float | None
    margin: float | None
    verdict: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One run, compared with the first."""

    name: str
    uri: str
    steps: int
    final: Final
    difference: float | None
    margin: float | None
    verdict: str
    """`baseline`, `better`, `worse`, `no difference beyond the margin`, `too little data` or `not comparable`."""
    other_task: tuple[str, ...]
    """Identity fields that make it another task than the first run's."""
    same_length: SameLength | None
    """Where this run has more or fewer steps than the first: the two again, as far as both go."""
    changed: tuple[tuple[str, Any, Any], ...]
    """Identity fields that differ: path, the first run's value, this run's."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The first run is what the others are held against."""

    entries: tuple[Entry, ...]
    reports: tuple[Report, ...]
    asked_margin: float

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "baseline": self.entries[0].name,
            "asked_margin": self.asked_margin,
            "formula": FORMULA,
            "runs": [
                {
                    "run": entry.name,
                    "uri": entry.uri,
                    "steps": entry.steps,
                    "reward_final": entry.final.reward,
                    "standard_error": entry.final.standard_error,
                    "final_steps": entry.final.steps,
                    "difference": entry.difference,
                    "margin": entry.margin,
                    "verdict": entry.verdict,
                    "same_length": asdict(entry.same_length) if entry.same_length else None,
                    "other_task": list(entry.other_task),
                    "changed": [{"field": path, "baseline": old, "here": new} for path, old, new in entry.changed],
                }
                for entry in self.entries
            ],
        }


def compare(reports: Sequence[Report], margin: float = 0.0, *, last: int | None = None) -> Comparison:
    """Holds every run against the first.

    Args:
        margin: a difference that matters to the reader; the runs' own noise may make it larger, never smaller.
        last: k; a fifth of the shortest run unless given, between 3 and 20 steps. All runs use the same k.
    """
    if margin < 0 or not math.isfinite(margin):
        raise UsageError(f"the margin is {margin}", where="--margin", fix="give a number that is not negative")
    if len(reports) < 2:
        raise UsageError("a comparison needs two runs", fix="name another run folder")
    shortest = min(len(report.rows) for report in reports)
    k = last or min(shortest, 20, max(3, shortest // 5))
    finals = [final_reward(report.rows, k) for report in reports]
    names = _names(reports)
    entries = [
        _entry(names[i], reports[i], finals[i], None if i == 0 else (reports[0], finals[0]), margin, k)
        for i in range(len(reports))
    ]
    return Comparison(tuple(entries), tuple(reports), margin)


def final_reward(rows: Sequence[MetricsRow], k: int) -> Final:
    """Mean of the last `k` steps' rewards and its standard error."""
    shown = [row for row in rows[-k:] if k > 0 and row.number("reward_mean") is not None]
    means = [row.number("reward_mean") or 0.0 for row in shown]
    if not means:
        return Final(None, None, 0)
    if len(means) < 2:
        return Final(means[0], None, 1)
    between = statistics.stdev(means) / math.sqrt(len(means))
    return Final(statistics.fmean(means), max(between, _within(shown)), len(means))


def _within(rows: Sequence[MetricsRow]) -> float:
    variance = 0.0
    for row in rows:
        samples = (row.number("reward_value") or 0.0) + (row.number("reward_wrong") or 0.0)
        if samples:
            variance += (row.number("reward_std") or 0.0) ** 2 / samples
    return math.sqrt(variance) / len(rows)


def noise_margin(a: Final, b: Final) -> float | None:
    """Half the width of the 95 % interval of the difference of two final rewards."""
    if a.standard_error is None or b.standard_error is None:
        return None
    va, vb = a.standard_error**2, b.standard_error**2
    if va + vb == 0.0:
        return 0.0
    df = (va + vb) ** 2 / (va**2 / (a.steps - 1) + vb**2 / (b.steps - 1))
    return _t975(df) * math.sqrt(va + vb)


def _t975(df: float) -> float:
    return _T975[max(known for known in _T975 if known <= max(1.0, df + 1e-9))]


def _entry(name: str, report: Report, final: Final, base: tuple[Report, Final] | None, asked: float, k: int) -> Entry:
    steps = len(report.rows)
    if base is None:
        return Entry(name, report.folder.uri, steps, final, None, None, "baseline", (), None, ())
    changed = differing(base[0], report)
    other_task = tuple(path for path, _, _ in changed if _is_task(path))
    difference, margin = _difference(base[1], final, asked)
    return Entry(
        name, report.folder.uri, steps, final, difference, margin, _verdict(difference, margin, other_task),
        other_task, _at_same_length(base[0], report, asked, other_task, k), changed,
    )  # fmt: skip


def _at_same_length(
    base: Report, report: Report, asked: float, other_task: tuple[str, ...], k: int
) -> SameLength | None:
    steps = min(len(base.rows), len(report.rows))
    if len(base.rows) == len(report.rows):
        return None
    before, after = (final_reward(each.rows[:steps], k) for each in (base, report))
    difference, margin = _difference(before, after, asked)
    return SameLength(steps, difference, margin, _verdict(difference, margin, other_task))


def _difference(base: Final, final: Final, asked: float) -> tuple[float | None, float | None]:
    """What `final` is above `base`, and the margin that it is held against."""
    noise = noise_margin(base, final)
    difference = None if final.reward is None or base.reward is None else final.reward - base.reward
    return difference, None if noise is None else max(noise, asked)


def _verdict(difference: float | None, margin: float | None, other_task: tuple[str, ...]) -> str:
    if other_task:
        return "not comparable"
    if difference is None or margin is None:
        return "too little data"
    if abs(difference) <= margin:
        return "no difference beyond the margin"
    return "better" if difference > 0 else "worse"


def differing(a: Report, b: Report) -> tuple[tuple[str, Any, Any], ...]:
    """Identity fields in which two runs differ."""
    left, right = a.identity, b.identity
    paths = sorted(set(left) | set(right))
    return tuple((path, left.get(path), right.get(path)) for path in paths if left.get(path) != right.get(path))


def _is_task(path: str) -> bool:
    plain = path.removeprefix("spec.").removeprefix("content.")
    return any(plain == field or plain.startswith((f"{field}.", f"{field}[")) for field in DIFFERENT_TASK)


def _names(reports: Sequence[Report]) -> list[str]:
    """Names as they are, or the folders where two runs share one."""
    names = [report.name for report in reports]
    return [report.folder.uri if names.count(report.name) > 1 else report.name for report in reports]
