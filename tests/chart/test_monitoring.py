"""Alerts by promtool, and every series that an alert or a panel asks for is one that somebody exports."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from chart.programs import find_program, run_well
from chart.rendering import ALL_MONITORING, Object, of_kind, pick, render
from ruamel.yaml import YAML

from tools.chart.grafana import all_panels

TESTS = Path(__file__).parent / "alerts"
VALUES: Object = {"monitoring": {**ALL_MONITORING, "rules": {"enabled": True}}}


def write_rules(objects: list[Object], folder: Path) -> Path:
    file = folder / "rules.yaml"
    with file.open("w") as stream:
        YAML(typ="safe").dump(pick(objects, "PrometheusRule")["spec"], stream)
    return file


def alerts(objects: list[Object]) -> Iterator[Object]:
    for group in pick(objects, "PrometheusRule")["spec"]["groups"]:
        yield from group["rules"]


def panels(objects: list[Object]) -> Iterator[tuple[str, str]]:
    """Title and query of every panel, with a value for each of Grafana's variables."""
    for each in of_kind(objects, "ConfigMap"):
        for text in each["data"].values():
            for panel in all_panels(json.loads(text)):
                for target in panel.get("targets", ()):
                    query = target["expr"].replace("$__rate_interval", "5m")
                    yield panel["title"], re.sub(r"\$(namespace|run)\b", "x", query)


def test_promtool_accepts_the_rules(helm: str, tmp_path: Path) -> None:
    assert "SUCCESS" in run_well(
        find_program("promtool"), "check", "rules", write_rules(render(helm, VALUES), tmp_path)
    )


@pytest.mark.parametrize("file", sorted(TESTS.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_alerts_fire_when_they_must_and_only_then(file: Path, tmp_path: Path) -> None:
    write_rules(render("helm4", VALUES), tmp_path)
    shutil.copy(file, tmp_path)
    run_well(find_program("promtool"), "test", "rules", tmp_path / file.name)


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    fires, rests = set(), set()
    for file in TESTS.glob("*.yaml"):
        for test in YAML(typ="safe").load(file)["tests"]:
            for case in test["alert_rule_test"]:
                (fires if case.get("exp_alerts") else rests).add(case["alertname"])
    names = {rule["alert"] for rule in alerts(render("helm4", VALUES))}
    assert fires == rests == names


def test_limits_labels_and_runbooks_come_from_the_values(helm: str) -> None:
    rules = {
        "enabled": True, "labels": {"team": "rl"}, "disabled": ["OrbitRunPending"], "runbookURLPrefix": "x#",
        "limits": {"noProgressSeconds": 1234567},
    }  # fmt: skip
    made = {rule["alert"]: rule for rule in alerts(render(helm, {"monitoring": {"rules": rules}}))}
    assert "OrbitRunPending" not in made
    assert re.search(r"> 1\.?234567(e\+06)?\b", made["OrbitRunNoProgress"]["expr"])
    assert {rule["labels"]["team"] for rule in made.values()} == {"rl"}
    assert made["OrbitRunFailed"]["annotations"]["runbook_url"] == "x#OrbitRunFailed"
    assert not re.search(r"\$\{", json.dumps(list(made.values())))


def test_every_panel_holds_valid_promql(tmp_path: Path) -> None:
    found = list(panels(render("helm4", VALUES)))
    assert len(found) > 40
    rules = [{"record": f"panel:{index}", "expr": query} for index, (_, query) in enumerate(found)]
    file = tmp_path / "panels.yaml"
    with file.open("w") as stream:
        YAML(typ="safe").dump({"groups": [{"name": "panels", "rules": rules}]}, stream)
    run_well(find_program("promtool"), "check", "rules", file)


def test_dashboards_are_complete_objects(helm: str) -> None:
    for each in of_kind(render(helm, VALUES), "ConfigMap"):
        (text,) = each["data"].values()
        dashboard = json.loads(text)
        assert dashboard["uid"] in ("orbit-fleet", "orbit-run")
        identities = [panel["id"] for panel in all_panels(dashboard)]
        assert len(identities) == len(set(identities))
        for panel in all_panels(dashboard):
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            assert panel["title"]
        assert each["metadata"]["namespace"] == "grafana"
        assert each["metadata"]["annotations"] == {"grafana_folder": "Orbit"}


def test_monitors_carry_the_labels_that_prometheus_selects_by(helm: str) -> None:
    for each in of_kind(render(helm, VALUES), "ServiceMonitor", "PodMonitor", "PrometheusRule"):
        assert each["metadata"]["labels"]["release"] == "prometheus"


def test_pods_of_a_runs_ranks_are_not_scraped_for_the_run(helm: str) -> None:
    selector = pick(render(helm, VALUES), "PodMonitor")["spec"]["selector"]
    assert selector["matchExpressions"] == [{"key": "orbitrl.dev/attempt", "operator": "Exists"}]


def test_a_run_cannot_speak_for_another(helm: str) -> None:
    """`run` and `attempt` come from the pod's labels, and what the pod claims is dropped."""
    (endpoint,) = pick(render(helm, VALUES), "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["honorLabels"] is False
    assert [each["targetLabel"] for each in endpoint["relabelings"]] == ["run", "attempt"]
    assert endpoint["metricRelabelings"] == [{"action": "labeldrop", "regex": "exported_(namespace|run|attempt)"}]
