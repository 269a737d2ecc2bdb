"""`Report`: a run folder as Python's own lists and dicts.

Belongs here: the few stable names. Does not belong here: what a number means (`observability`), the page
(`observability.report_html`).
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from orbit_runtime.api.samples import Sample, read_samples, sampled_steps
from orbit_runtime.errors import UsageError
from orbit_runtime.observability.compare import compare
from orbit_runtime.observability.metrics import Value, evaluation_field
from orbit_runtime.observability.progress import sparkline
from orbit_runtime.observability.report import build_report
from orbit_runtime.storage import open_store

SPARKS = 40


@dataclass(frozen=True, slots=True)
class Headline:
    """The run's main measure: its evaluation, else its reward, or its loss if nothing is scored."""

    name: str
    """`held-out loss`, the evaluation's name, `reward` or `loss`."""
    first: float | None
    last: float | None
    steps: int | None = None
    """Number of steps at each end of which a reward is the mean."""

    @property
    def change(self) -> float | None:
        """The last value minus the first; None if either is unknown."""
        return None if self.first is None or self.last is None else self.last - self.first


@dataclass(frozen=True, slots=True)
class Compared:
    """A run compared with another one, the baseline."""

    name: str
    uri: str
    reward: float | None
    """Mean of its last steps; None if it learned from demonstrations."""
    standard_error: float | None
    """Standard error of the reward, or of the loss."""
    difference: float | None
    """Difference from the baseline's."""
    margin: float | None
    """Half the width of the difference's 95 % interval, or the requested margin if that is larger."""
    verdict: str
    """`baseline`, `better`, `worse`, `no difference beyond the margin`, `too little data` or `not comparable`."""
    changed: Mapping[str, tuple[Any, Any]]
    """Fields of the manifest that differ: the baseline's value, and this run's."""
    loss: float | None = None
    """Mean of its last held-out losses, for demonstrations. Lower is better."""


class Report:
    """The content of a run folder at the time it is opened, whether the run is in progress or has ended.

    Args:
        uri: a run folder or its address.

    Raises:
        UsageError: there is no run.
    """

    def __init__(self, uri: str | Path) -> None:
        self._store = open_store(str(uri), writable=False)
        self._found = build_report(self._store, samples=False)
        if self._found.status == "empty" and not self._found.folder.run:
            raise UsageError(
                "there is no run here", where=self._store.uri, fix="name a run folder; `orbit ls URI` lists them"
            )

    @property
    def uri(self) -> str:
        """The address of the run folder."""
        return self._store.uri

    @property
    def name(self) -> str:
        """The run's name, from its manifest."""
        return self._found.name

    @property
    def status(self) -> str:
        """`done`, `stopped`, `failed`, `running`, `interrupted` or `empty`."""
        return self._found.status

    @property
    def reason(self) -> str | None:
        """An explanation for people, if the status alone says too little."""
        return self._found.reason

    @property
    def warnings(self) -> Sequence[str]:
        """Warnings that a reader of the numbers should know."""
        return list(self._found.warnings)

    @property
    def headline(self) -> Headline:
        """First and last value of the run's main measure."""
        return Headline(**self._found.headline)

    @property
    def steps(self) -> int:
        """Number of completed steps."""
        return int(self.to_dict()["steps"])

    @cached_property
    def rows(self) -> list[dict[str, Value]]:
        """The metrics of each step, in order: docs/reference/metrics.md."""
        return [dict(row) for row in self._found.rows]

    @cached_property
    def curves(self) -> dict[str, list[float | None]]:
        """Metric → its value at each step, None for steps without one. Metrics that no step has are left out."""
        names = dict.fromkeys(name for row in self._found.rows for name in row)
        columns = {name: [row.number(name) if name in row else None for row in self._found.rows] for name in names}
        return {name: values for name, values in columns.items() if any(value is not None for value in values)}

    @property
    def adapter(self) -> str | None:
        """Address of the newest adapter, in PEFT's format; None before there is one."""
        adapters = self._found.folder.adapters
        return f"{self.uri}/{adapters[0]['prefix']}" if adapters else None

    @property
    def sampled_steps(self) -> list[int]:
        """Steps whose samples are kept."""
        return list(sampled_steps(self._store))

    def samples(self, step: int | None = None) -> list[Sample]:
        """The policy's answers in one step, with their rewards.

        Args:
            step: from 1; None: the last one with samples.

        Raises:
            DataError: the step has no samples, or they cannot be read.
        """
        return read_samples(self._store, step)

    def compare(self, *others: Report, margin: float = 0.0) -> list[Compared]:
        """Compares other runs with this one: is one better by more than the noise of both?

        Args:
            margin: differences below it do not matter to you.

        Raises:
            UsageError: no other run is given.
        """
        found = compare([self._found, *(other._found for other in others)], margin)
        is_loss = found.measure.is_lower_better
        return [
            Compared(
                entry.name,
                entry.uri,
                None if is_loss else entry.final.value,
                entry.final.standard_error,
                entry.difference,
                entry.margin,
                entry.verdict,
                {path: (before, here) for path, before, here in entry.changed},
                entry.final.value if is_loss else None,
            )
            for entry in found.entries
        ]

    def to_dict(self) -> dict[str, Any]:
        """The content of `report.json`. Keys may be added; existing ones stay."""
        return self._found.to_json()

    def __repr__(self) -> str:
        return f"Report({self.uri!r})"

    def __str__(self) -> str:
        head, lines = self.headline, []
        for name, value in (("first", head.first), ("last", head.last)):
            lines.append(f"{name} -" if value is None else f"{name} {value:.4f}")
        spark = sparkline([value for value in self._headline_curve() if value is not None], SPARKS)
        return f"{self.name}: {self.status} after {self.steps} steps; {head.name} {', '.join(lines)}  {spark}".rstrip()

    def _repr_html_(self) -> str:
        """The report as shown in a notebook."""
        return f"<p>{html.escape(str(self))}</p>"

    def _headline_curve(self) -> list[float | None]:
        names = {"reward": "reward_mean", "loss": "loss", "held-out loss": "validation_loss"}
        name = self.headline.name
        return self.curves.get(names.get(name) or evaluation_field(name, "mean"), [])
