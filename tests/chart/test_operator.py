"""The Deployment, the CRD and the objects around them are what the operator's own code expects."""

from __future__ import annotations

from typing import Any

from chart.programs import ROOT
from chart.rendering import COMBINATIONS, NAMESPACE, Object, of_kind, pick, render
from ruamel.yaml import YAML


def container(objects: list[Object]) -> Object:
    return pick(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]  # type: ignore[no-any-return]


def environment(objects: list[Object]) -> dict[str, str]:
    """As the kubelet fills it in."""
    filled = {"metadata.namespace": NAMESPACE, "metadata.name": "orbit-operator-0"}
    return {
        each["name"]: each["value"] if "value" in each else filled[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container(objects)["env"]
    }


def test_there_is_one_operator_at_a_time(helm: str) -> None:
    spec = pick(render(helm, {}), "Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 30
    assert pod["priorityClassName"] == "system-cluster-critical"


def test_selectors_find_their_pods(helm: str, combination: str) -> None:
    objects = render(helm, COMBINATIONS[combination])
    deployment = pick(objects, "Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"].items()
    assert deployment["selector"]["matchLabels"].items() <= labels
    assert pick(objects, "Service")["spec"]["selector"].items() <= labels
    for policy in of_kind(objects, "NetworkPolicy"):
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels
    for budget in of_kind(objects, "PodDisruptionBudget"):
        if budget["metadata"]["name"].endswith("-operator"):
            assert budget["spec"]["selector"]["matchLabels"].items() <= labels
    for monitor in of_kind(objects, "ServiceMonitor"):
        assert (
            monitor["spec"]["selector"]["matchLabels"].items() <= pick(objects, "Service")["metadata"]["labels"].items()
        )
    tests = [each["metadata"]["labels"] for each in of_kind(objects, "Pod")]
    for policy in of_kind(objects, "NetworkPolicy"):
        allowed = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"].items()
        assert all(allowed <= each.items() for each in tests)


def test_probes_and_services_use_ports_that_exist(helm: str) -> None:
    objects = render(helm, {})
    ports = {each["name"]: each["containerPort"] for each in container(objects)["ports"]}
    assert ports == {"metrics": 8080, "health": 8081}
    assert {container(objects)[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "liveness", "readiness")} == {
        "health"
    }
    assert [each["targetPort"] for each in pick(objects, "Service")["spec"]["ports"]] == ["metrics"]
    set_ports = environment(objects)
    assert set_ports["ORBIT_OPERATOR_METRICS_PORT"] == "8080"
    assert set_ports["ORBIT_OPERATOR_HEALTH_PORT"] == "8081"


def test_every_object_carries_the_recommended_labels(helm: str, combination: str) -> None:
    wanted = {"name", "instance", "version", "component", "part-of", "managed-by"}
    for each in render(helm, COMBINATIONS[combination]):
        labels = each["metadata"]["labels"]
        assert {f"app.kubernetes.io/{name}" for name in wanted} <= set(labels), each["metadata"]["name"]
        assert labels["helm.sh/chart"].startswith("orbit-")


def test_images_go_by_digest_before_tag(helm: str) -> None:
    objects = render(helm, COMBINATIONS["everything"])
    assert container(objects)["image"] == "images.example.com/orbit-operator@sha256:" + "0" * 64
    assert environment(objects)["ORBIT_OPERATOR_RUNTIME_IMAGE"] == "images.example.com/orbit-runtime:1.2.3"
    chart = YAML(typ="safe").load(ROOT / "charts/orbit/Chart.yaml")
    assert container(render(helm, {}))["image"] == f"orbit-operator:{chart['appVersion']}"


def test_the_crd_is_the_generated_one_and_survives_uninstalling(helm: str) -> None:
    crd: dict[str, Any] = pick(render(helm, {}), "CustomResourceDefinition")
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    source = YAML(typ="safe").load(ROOT / "crds/orbitruns.orbitrl.dev.yaml")
    assert crd["spec"] == source["spec"]
    assert source["metadata"].get("annotations", {}).items() <= crd["metadata"]["annotations"].items()
    assert of_kind(render(helm, {"crds": {"install": False}}), "CustomResourceDefinition") == []


def test_what_is_not_kept_belongs_to_the_release(helm: str, combination: str) -> None:
    for each in render(helm, COMBINATIONS[combination]):
        annotations = each["metadata"].get("annotations", {})
        is_kept = "helm.sh/resource-policy" in annotations
        assert is_kept == (each["kind"] == "CustomResourceDefinition")
