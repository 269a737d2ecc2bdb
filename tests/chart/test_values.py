"""The schema of values, as Helm applies it: unknown keys and impossible values are refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from chart.programs import CHART
from chart.rendering import Object, refusal, render

SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def closed_blocks(schema: Object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all objects that list their keys."""
    if schema.get("properties") and path != ("global",):
        yield path
        for name, child in schema["properties"].items():
            yield from closed_blocks(child, (*path, name))


def nested(path: tuple[str, ...], value: Any) -> Object:
    for name in reversed(path):
        value = {name: value}
    return value  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", list(closed_blocks(SCHEMA)), ids=lambda path: ".".join(path) or "top")
def test_an_unknown_key_is_refused_at_every_level(path: tuple[str, ...]) -> None:
    said = refusal("helm4", nested((*path, "unknownKey"), 1))
    assert "unknownKey" in said


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("watchNamespaces", ["Team_A"]),
        ("watchNamespaces", "team-a"),
        ("clusterScope", "yes"),
        ("image.repository", ""),
        ("image.digest", "latest"),
        ("image.pullPolicy", "Sometimes"),
        ("imagePullSecrets", ["name"]),
        ("operator.logLevel", "debug"),
        ("operator.workers", 0),
        ("operator.workers", 2.5),
        ("operator.pollSeconds", "15s"),
        ("runs.cpu", 1.5),
        ("runs.cpuRequestPerGPU", -1),
        ("runs.cpuRequestPerGPU", "4"),
        ("runs.nodeSelector.pool", True),
        ("runs.tolerations", [{"keys": "a"}]),
        ("runs.tolerations", [{"operator": "In"}]),
        ("runs.egress", [{"cidr": "10.0.0.1"}]),
        ("runs.egress", [{"namespace": "minio", "ports": ["80"]}]),
        ("runs.priorityClassName", "High Priority"),
        ("runs.podLabels.team", 1),
        ("runs.podLabels", {"orbitrl.dev/attempt": "1"}),
        ("runs.podLabels", {"kueue.x-k8s.io/priority-class": "high"}),
        ("runs.pod", {"hostNetwork": True}),
        ("runs.queueName", "team a"),
        ("fences.maxGPUs", -1),
        ("fences.secrets", [""]),
        ("networkPolicy.httpsCIDRs", ["10.0.0.1"]),
        ("runs.podAnnotations", {"batch.kubernetes.io/job-name": "x"}),
        ("runs.ttlSecondsAfterFinished", -2),
        ("runAsUser", 0),
        ("resources.limits.memory", "much"),
        ("resources.limit", {}),
        ("nodeSelector.gpu", True),
        ("networkPolicy.apiServerPorts", []),
        ("networkPolicy.apiServerCIDRs", ["10.0.0.1"]),
        ("monitoring.podMonitor.interval", "often"),
        ("monitoring.rules.limits.klFactor", 1),
        ("serviceAccount.annotations.role", 1),
    ],
)
def test_an_impossible_value_is_refused(helm: str, path: str, value: Any) -> None:
    said = refusal(helm, nested(tuple(path.split(".")), value))
    assert path.split(".")[-1] in said or path.split(".")[-2] in said


def test_values_of_a_parent_chart_are_let_through(helm: str) -> None:
    assert render(helm, {"global": {"imageRegistry": "images.example.com"}})


def test_the_user_can_be_left_to_the_cluster(helm: str) -> None:
    deployment = next(each for each in render(helm, {"runAsUser": None}) if each["kind"] == "Deployment")
    context = deployment["spec"]["template"]["spec"]["securityContext"]
    assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
