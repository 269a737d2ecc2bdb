"""Compares several runs: whether one is better by more than its noise.

Belongs here: the statistics of a comparison, and the rules on when runs must not be compared.
Does not belong here: reading runs (`report`) or showing the answer (`report_html`, `cli`).

The final reward of a run is that of its last k steps. The margin of a difference is that of two such windows
(`windows`), or the requested margin if that is larger.

Runs on demonstrations have no reward: their final held-out loss takes its place, and lower is better. Losses are only
comparable for the same held-out answers in the same tokens.

Runs that differ only in their seed are one configuration. Its reward is the mean of its runs' final rewards, and its
standard error the larger of two: between seeds, s / sqrt(n), and within, from the windows of its runs.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orbit_runtime.errors import UsageError
from orbit_runtime.observability.metrics import MetricsRow
from orbit_runtime.observability.report import Report
from orbit_runtime.observability.windows import (
    Window,
    final_loss,
    final_reward,
    held_out_losses,
    noise_margin,
    window_steps,
)

SEED = "data.seed"
FORMULA = "t(0.975, Welch df) * sqrt(se_a^2 + se_b^2); se = max(between steps, within steps); at least --margin"
DIFFERENT_TASK = ("data.prompts", "environment", "model.maxSequenceLength")
"""Identity fields below these define the task: if they differ, rewards are not on one scale."""
OTHER_ANSWERS = (
    "algorithm.type", "data.prompts", "data.limit", "data.chat", "data.seed", "data.validation.share",
    "model.maxSequenceLength", "model.tokenizer.json", "model.tokenizer_config.json", "model.chat_template.jinja",
)  # fmt: skip
"""Identity fields below these determine the held-out answers, which depend on the seed, or their tokens."""


@dataclass(frozen=True, slots=True)
class RunMeasure:
    """The measure by which runs are compared."""

    name: str
    final: Callable[[Sequence[MetricsRow], int], Window]
    """The value over the last steps of a run's rows, given their number."""
    count: Callable[[Sequence[MetricsRow]], int]
    """Number of steps that have the measure."""
    steps: str
    """Unit of these steps, for readers."""
    other_task: tuple[str, ...]
    """Identity fields that must agree for two values to be on one scale."""
    is_lower_better: bool = False


REWARD = RunMeasure("reward", final_reward, len, "steps", DIFFERENT_TASK)
LOSS = RunMeasure(
    "held-out loss", final_loss, lambda rows: len(held_out_losses(rows)), "measurements", OTHER_ANSWERS, True
)


@dataclass(frozen=True, slots=True)
class SameLength:
    """A run and the first run after equally many steps: further steps of the longer one do not count."""

    steps: int
    difference: float | None
    margin: float | None
    verdict: str


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One run, compared with the first."""

    name: str
    uri: str
    steps: int
    final: Window
    difference: float | None
    margin: float | None
    verdict: str
    """`baseline`, `better`, `worse`, `no difference beyond the margin`, `too little data` or `not comparable`."""
    other_task: tuple[str, ...]
    """Identity fields that make its task differ from the first run's."""
    same_length: SameLength | None
    """The comparison with the first run over their common steps; set if the numbers of steps differ."""
    changed: tuple[tuple[str, Any, Any], ...]
    """Identity fields that differ: path, the first run's value, this run's."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """Runs that differ only in their seed, compared with the first configuration."""

    name: str
    members: tuple[int, ...]
    """Indexes of its runs in the comparison."""
    value: float | None
    """Value of the measure."""
    standard_error: float | None
    difference: float | None
    margin: float | None
    verdict: str
    """See `RunEntry`."""

    @property
    def seeds(self) -> int:
        return len(self.members)


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The first run is the baseline of the others."""

    entries: tuple[RunEntry, ...]
    reports: tuple[Report, ...]
    asked_margin: float
    configurations: tuple[Configuration, ...]
    measure: RunMeasure

    @property
    def has_seeds(self) -> bool:
        """Whether runs were repeated with other seeds."""
        return len(self.configurations) < len(self.entries)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "baseline": self.entries[0].name,
            "asked_margin": self.asked_margin,
            "measure": self.measure.name,
            "formula": FORMULA,
            "configurations": [
                {**asdict(each), "members": [self.entries[at].name for at in each.members]}
                for each in self.configurations
            ],
            "runs": [
                {
                    "run": entry.name,
                    "uri": entry.uri,
                    "steps": entry.steps,
                    "reward_final": entry.final.value if self.measure is REWARD else None,
                    "loss_final": entry.final.value if self.measure is LOSS else None,
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


def compare(reports: Sequence[Report], margin: float = 0.0, *, last: int | None = None) -> RunComparison:
    """Compares every run with the first: by reward, or if the first learned from demonstrations, by held-out loss.

    Args:
        margin: the smallest difference that matters to the reader; noise may make it larger, never smaller.
        last: k; by default a fifth of the shortest run, between 3 and 20 steps. All runs use the same k.
    """
    if margin < 0 or not math.isfinite(margin):
        raise UsageError(f"the margin is {margin}", where="--margin", fix="give a number that is not negative")
    if len(reports) < 2:
        raise UsageError("a comparison needs two runs", fix="name another run folder")
    measure = LOSS if reports[0].samples_nothing else REWARD
    shortest = min(measure.count(report.rows) for report in reports)
    judge = Judge(measure, margin, last or window_steps(shortest))
    finals = [measure.final(report.rows, judge.k) for report in reports]
    names = _names(reports)
    entries = [
        _entry(names[i], reports[i], finals[i], None if i == 0 else (reports[0], finals[0]), judge)
        for i in range(len(reports))
    ]
    return RunComparison(tuple(entries), tuple(reports), margin, _configurations(reports, entries, judge), measure)


@dataclass(frozen=True, slots=True)
class Judge:
    """Rules by which one comparison judges a difference."""

    measure: RunMeasure
    asked: float
    """The requested margin."""
    k: int
    """Number of steps in a window."""

    def difference(self, base: Window, final: Window) -> tuple[float | None, float | None]:
        """The difference `final` - `base`, and its margin."""
        noise = noise_margin(base, final)
        difference = None if final.value is None or base.value is None else final.value - base.value
        return difference, None if noise is None else max(noise, self.asked)

    def verdict(self, difference: float | None, margin: float | None, other_task: tuple[str, ...]) -> str:
        if other_task:
            return "not comparable"
        if difference is None or margin is None:
            return "too little data"
        if abs(difference) <= margin:
            return "no difference beyond the margin"
        return "better" if (difference < 0) == self.measure.is_lower_better else "worse"


def _configurations(reports: Sequence[Report], entries: Sequence[RunEntry], judge: Judge) -> tuple[Configuration, ...]:
    """Configurations in the order of their first runs."""
    found: list[Configuration] = []
    base: Window | None = None
    for runs in _by_seed(reports):
        window = over_seeds([entries[at].final for at in runs])
        name = _common_name([entries[at].name for at in runs])
        if base is None:
            base = window
            difference, margin, verdict = None, None, "baseline"
        else:
            difference, margin = judge.difference(base, window)
            verdict = judge.verdict(difference, margin, entries[runs[0]].other_task)
        found.append(Configuration(name, tuple(runs), window.value, window.standard_error, difference, margin, verdict))
    return tuple(found)


def _by_seed(reports: Sequence[Report]) -> list[list[int]]:
    """Groups runs of one length that differ only in their seeds. A run that repeats a seed is kept separate: it adds
    nothing to the spread between seeds.
    """
    groups: list[list[int]] = []
    place: dict[str, tuple[list[int], set[str]]] = {}
    for at, report in enumerate(reports):
        same = {path: value for path, value in report.identity.items() if not _is_seed(path)}
        seed = str([value for path, value in report.identity.items() if _is_seed(path)])
        key = json.dumps([len(report.rows), same], sort_keys=True, default=str)
        members, seeds = place.get(key, ([], {seed}))
        if seed in seeds:
            members, seeds = [], set()
            groups.append(members)
            place.setdefault(key, (members, seeds))
        members.append(at)
        seeds.add(seed)
    return groups


def _is_seed(path: str) -> bool:
    return path.removeprefix("spec.") == SEED


def over_seeds(finals: Sequence[Window]) -> Window:
    """The run's own window if there is one run; otherwise `steps` counts seeds."""
    if len(finals) == 1:
        return finals[0]
    values = [final.value for final in finals if final.value is not None]
    if len(values) < len(finals):
        return Window(None, None, 0)
    between = statistics.stdev(values) / math.sqrt(len(values))
    within = math.sqrt(sum((final.standard_error or 0.0) ** 2 for final in finals)) / len(finals)
    return Window(statistics.fmean(values), max(between, within), len(values))


def _common_name(names: Sequence[str]) -> str:
    """Name of runs that differ in their seed. Example: `_common_name(["lr-s1", "lr-s2"]) == "lr"`"""
    if len(names) == 1:
        return names[0]
    low, high = min(names), max(names)
    length = next((at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return re.sub(r"[-_./ ]*(seed|s)?[-_./ ]*$", "", low[:length]) or names[0]


def _entry(name: str, report: Report, final: Window, base: tuple[Report, Window] | None, judge: Judge) -> RunEntry:
    steps = len(report.rows)
    if base is None:
        return RunEntry(name, report.folder.uri, steps, final, None, None, "baseline", (), None, ())
    changed = differing(base[0], report)
    other_task = tuple(path for path, _, _ in changed if _is_task(path, judge.measure.other_task))
    if base[0].samples_nothing != report.samples_nothing and "algorithm.type" not in other_task:
        other_task = ("algorithm.type", *other_task)
    difference, margin = judge.difference(base[1], final)
    return RunEntry(
        name, report.folder.uri, steps, final, difference, margin, judge.verdict(difference, margin, other_task),
        other_task, _at_same_length(base[0], report, other_task, judge), changed,
    )  # fmt: skip


def _at_same_length(base: Report, report: Report, other_task: tuple[str, ...], judge: Judge) -> SameLength | None:
    steps = min(len(base.rows), len(report.rows))
    if len(base.rows) == len(report.rows):
        return None
    before, after = (judge.measure.final(each.rows[:steps], judge.k) for each in (base, report))
    difference, margin = judge.difference(before, after)
    return SameLength(steps, difference, margin, judge.verdict(difference, margin, other_task))


def differing(a: Report, b: Report) -> tuple[tuple[str, Any, Any], ...]:
    """Identity fields in which two runs differ."""
    left, right = a.identity, b.identity
    paths = sorted(set(left) | set(right))
    return tuple((path, left.get(path), right.get(path)) for path in paths if left.get(path) != right.get(path))


def _is_task(path: str, fields: tuple[str, ...]) -> bool:
    plain = path.removeprefix("spec.").removeprefix("content.")
    return any(plain == field or plain.startswith((f"{field}.", f"{field}[")) for field in fields)


def _names(reports: Sequence[Report]) -> list[str]:
    """Unique names: where two runs share a name, as much of the end of their folders as distinguishes them."""
    names = [report.name for report in reports]
    return [
        _end_apart(report, [other for other in reports if other.name == report.name])
        if names.count(report.name) > 1
        else report.name
        for report in reports
    ]


def _end_apart(report: Report, namesakes: Sequence[Report]) -> str:
    parts = report.folder.uri.rstrip("/").split("/")
    ends = [other.folder.uri.rstrip("/").split("/") for other in namesakes if other is not report]
    for count in range(1, len(parts) + 1):
        if all(other[-count:] != parts[-count:] for other in ends):
            return "/".join(parts[-count:])
    return report.folder.uri
