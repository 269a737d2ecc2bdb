"""Every series that an alert or a panel asks for is exported, with the labels that it is asked by."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from orbit_operator.metrics import RUN_SERIES, Metrics, build_text
from orbit_runtime.observability.metrics import EVALUATION, METRICS, REWARD_PART, SOURCE, RunMetrics, build_row
from tools.chart.grafana import all_panels

CHART = Path(__file__).parents[2] / "charts/orbit/files"
FILES = [CHART / "alerts.yaml", *sorted((CHART / "dashboards").glob("*.json"))]
TARGET_LABELS = {"namespace", "run", "attempt", "job", "pod"}
"""What Prometheus adds, and what a run's series carry whoever exports them."""

SERIES = re.compile(r"\b(orbit_(?:run|operator)_[a-z0-9_]+)(?:\{([^}]*)\})?")
STATUS = {
    "phase": "Running",
    "conditions": [{"type": "Progressing", "status": "True"}],
    "attempts": [
        {"ending": {"budget": "Infra", "reason": "NodeLost", "whoActs": "Cluster", "time": "2026-01-01T00:00:00Z"}}
    ],
    "completionTime": "2026-01-01T00:00:00Z",
    "checkpoint": {"time": "2026-01-01T00:00:00Z"},
}


def exported() -> dict[str, set[str]]:
    """Series → its labels, as a run and an operator really print them."""
    run = RunMetrics(run="r", namespace="n", attempt=1)
    values = {metric.name: "x" if metric.display == "s" else 1 for metric in METRICS}
    run.observe(build_row(**values, reward_part_correct_mean=1, eval_sums_mean=1, source_sums_reward=1))
    run.set_target(1)
    run.set_progress(1.0)
    run.follow_signs(lambda: 1.0)
    operator = Metrics()
    operator.mark_refused("n", True)
    operator.runs["n", "r"] = build_text("n", "r", {}, STATUS, 8)
    found: dict[str, set[str]] = {}
    for line in b"".join((run.render(), *operator.render())).decode().splitlines():
        sample = re.match(r"^(orbit_[a-z0-9_]+)(?:\{(.*)\})? ", line)
        if sample:
            found.setdefault(sample[1], set()).update(re.findall(r'(\w+)="', sample[2] or ""))
    return found


def asked(text: str) -> Iterator[tuple[str, set[str]]]:
    for name, matchers in SERIES.findall(text):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|=|!=|!~)", matchers))


def queries(file: Path) -> str:
    if file.suffix == ".yaml":
        return "\n".join(line for line in file.read_text().splitlines() if not line.lstrip().startswith("description"))
    dashboard = json.loads(file.read_text())
    made = [target["expr"] for panel in all_panels(dashboard) for target in panel.get("targets", ())]
    return "\n".join(
        made + [each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_series_that_is_asked_for_is_exported(file: Path) -> None:
    known = exported()
    found = list(asked(queries(file)))
    assert len(found) > 15
    for name, labels in found:
        assert name in known, name
        assert labels <= known[name] | TARGET_LABELS, (name, labels)


def test_every_panel_says_what_it_shows_and_rows_for_some_runs_are_closed() -> None:
    fleet, run = (json.loads((CHART / f"dashboards/{name}.json").read_text()) for name in ("fleet", "run"))
    for panel in (*all_panels(fleet), *all_panels(run)):
        assert panel["type"] == "row" or panel["description"], panel["title"]
    closed = [panel["title"] for panel in run["panels"] if panel.get("collapsed")]
    assert closed == ["Trust", "Engine", "Speed", "Some runs only"]
    assert sum(panel["type"] != "row" for panel in run["panels"]) <= 20
    heights = dict(lines := {(panel["gridPos"]["y"], panel["gridPos"]["h"]) for panel in run["panels"]})
    assert len(heights) == len(lines), "a low panel beside a high one leaves a hole"
    (table,) = [panel for panel in fleet["panels"] if panel["type"] == "table"]
    assert f"/d/{run['uid']}?" in json.dumps(table["fieldConfig"]["overrides"])


def test_every_series_of_a_run_that_the_operator_exports_is_shown_or_alerts() -> None:
    used = {name for file in FILES for name, _ in asked(queries(file))}
    # What the run's row shows already, or a table in Grafana joins.
    assert {f"orbit_run_{name}" for name in RUN_SERIES} - used == set()


def test_numbers_of_a_step_are_on_a_dashboard() -> None:
    used = {name.removesuffix("_total") for file in FILES for name, _ in asked(queries(file))}
    assert {
        metric.prometheus for metric in (*METRICS, REWARD_PART, EVALUATION, SOURCE) if metric.prometheus is not None
    } - used == set()
