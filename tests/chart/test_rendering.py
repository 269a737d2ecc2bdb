"""Every combination of values is lint-free, the same from Helm 3 and 4, and valid on two versions of Kubernetes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chart.kube_schemas import KUBERNETES
from chart.programs import find_program, run
from chart.rendering import COMBINATIONS, lint, of_kind, refusal, render, render_text

SCHEMA_NAME = "{{.NormalizedKubernetesVersion}}/{{.ResourceKind}}{{.KindSuffix}}.json"


def validate(schemas: Path, version: str, text: str) -> tuple[int, str]:
    """kubeconform's verdict. The CRD itself is judged by the API server's own rules, which no schema holds."""
    done = run(
        find_program("kubeconform"), "-strict", "-summary", "-output", "json", "-kubernetes-version", version,
        "-schema-location", f"{schemas}/{SCHEMA_NAME}", "-", stdin=text,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_lint_finds_nothing(helm: str, combination: str) -> None:
    assert "0 chart(s) failed" in lint(helm, COMBINATIONS[combination])


def test_both_helms_render_the_same_objects(combination: str) -> None:
    def by_name(helm: str) -> dict[str, object]:
        objects = render(helm, COMBINATIONS[combination])
        return {f"{o['kind']}/{o['metadata'].get('namespace')}/{o['metadata']['name']}": o for o in objects}

    three, four = by_name("helm3"), by_name("helm4")
    assert set(three) == set(four)
    assert three == four


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_is_valid(schemas: Path, combination: str, version: str) -> None:
    text = render_text("helm4", COMBINATIONS[combination], version)
    code, report = validate(schemas, version, text)
    summary = json.loads(report)["summary"]
    assert (code, summary["invalid"], summary["errors"], summary["skipped"]) == (0, 0, 0, 0), report
    assert summary["valid"] == len(render("helm4", COMBINATIONS[combination], version)) >= 3


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        ("Deployment", ("replicas: 1", "replicaz: 1")),
        ("Deployment", ("readOnlyRootFilesystem: true", "readonlyRootFilesystem: true")),
        ("NetworkPolicy", ("protocol: UDP", "protocoll: UDP")),
        ("PodMonitor", ("honorLabels: false", "honourLabels: false")),
        ("PrometheusRule", ("expr:", "expression:")),
        ("CustomResourceDefinition", ("shortNames:", "shortnames:")),
    ],
)
def test_the_schemas_find_a_misspelt_field(schemas: Path, version: str, kind: str, broken: tuple[str, str]) -> None:
    text = render_text("helm4", COMBINATIONS["everything"], version)
    document = next(each for each in text.split("\n---\n") if f"\nkind: {kind}\n" in each)
    assert broken[0] in document
    code, report = validate(schemas, version, document.replace(*broken, 1))
    assert code == 1, report
    assert broken[1].split(":")[0] in report


def test_names_of_a_long_release_stay_within_bounds(helm: str) -> None:
    for each in render(helm, {"fullnameOverride": "x" * 60, "monitoring": COMBINATIONS["everything"]["monitoring"]}):
        # A ClusterRole has its namespace in its name, up to 63 letters; the API server allows 253 there.
        bound = 253 - 63 if each["kind"].startswith("ClusterRole") else 63
        assert len(each["metadata"]["name"]) <= bound, each["metadata"]["name"]


def test_monitors_without_the_prometheus_operator_are_refused_with_the_fix(helm: str) -> None:
    for name in ("serviceMonitor", "podMonitor", "rules"):
        said = refusal(helm, {"monitoring": {name: {"enabled": True}}}, with_monitoring_api=False)
        assert f"monitoring.{name}.enabled needs the Prometheus operator" in said


def test_contradictions_are_refused_with_the_fix(helm: str) -> None:
    assert "leave watchNamespaces empty" in refusal(helm, {"clusterScope": True, "watchNamespaces": ["a"]})
    assert "set clusterScope to false" in refusal(helm, {"clusterScope": True, "runs": {"protectFromEviction": True}})
    assert "serviceAccount.name is needed" in refusal(helm, {"serviceAccount": {"create": False}})


def test_an_older_kubernetes_is_refused(helm: str) -> None:
    with pytest.raises(AssertionError, match=r"1\.30\.0"):
        render(helm, {}, kube_version="1.30.0")


def test_dashboards_need_no_api(helm: str) -> None:
    maps = of_kind(render(helm, {"monitoring": {"dashboards": {"enabled": True}}}), "ConfigMap")
    assert {each["metadata"]["labels"]["grafana_dashboard"] for each in maps} == {"1"}
    assert len(maps) == 2
