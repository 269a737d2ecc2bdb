"""The Deployment, the CRD and the objects around them are what the operator's own code expects."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from chart.programs import ROOT
from chart.rendering import COMBINATIONS, NAMESPACE, Object, of_kind, pick, render
from ruamel.yaml import YAML

from orbit_operator.manifests.job import build_job
from orbit_operator.manifests.source import RunSource
from orbit_operator.settings import PREFIX, Settings, load_settings
from orbit_runtime.spec import OrbitRun
from orbit_runtime.spec.placement import Egress, Toleration


def container(objects: list[Object]) -> Object:
    return pick(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]  # type: ignore[no-any-return]


def environment(objects: list[Object]) -> dict[str, str]:
    """The environment as the kubelet fills it in."""
    filled = {"metadata.namespace": NAMESPACE, "metadata.name": "orbit-operator-0"}
    return {
        each["name"]: each["value"] if "value" in each else filled[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container(objects)["env"]
    }


def test_the_operator_takes_its_environment(helm: str, combination: str) -> None:
    """Read by its own code; a variable that it does not know, or one that is not set, is a failure."""
    given = environment(render(helm, COMBINATIONS[combination]))
    settings = load_settings(given)
    assert {PREFIX + field.name.upper() for field in fields(Settings)} == set(given)
    assert (not settings.namespaces) == (combination == "whole-cluster")


def test_values_reach_the_operator(helm: str) -> None:
    settings = load_settings(environment(render(helm, COMBINATIONS["everything"])))
    assert settings == Settings(
        namespaces=("team-a",),
        namespace=NAMESPACE,
        identity="orbit-operator-0",
        runtime_image="images.example.com/orbit-runtime:1.2.3",
        engine_image="images.example.com/orbit-engine:1.2.3",
        image_pull_secrets=("pull", "other"),
        run_cpu=16,
        run_cpu_per_gpu=2.5,
        run_memory="1Ti",
        run_node_selector={"pool": "gpu"},
        run_tolerations=(
            Toleration(key="dedicated", operator="Exists", effect="NoExecute", toleration_seconds=86400000),
        ),
        run_egress=(Egress(cidr="169.254.170.23/32", ports=(80,)), Egress(namespace="minio")),
        run_env={"HTTPS_PROXY": "http://proxy:3128"},
        run_ca_config_map="our-cas",
        run_as_user=-1,
        run_priority_class="training",
        run_queue="default-queue",
        run_pod={"runtimeClassName": "nvidia", "labels": {"kueue.x-k8s.io/priority-class": "high"}},
        dns_ports=("1053",),
        https_cidrs=("10.1.0.0/16",),
        run_pod_labels={"azure.workload.identity/use": "true"},
        run_pod_annotations={"example.com/note": 'a "quoted" <word> \\'},
        log_level="Debug",
        poll_seconds=1.5,
        resync_seconds=1000000.0,
        ttl_seconds=86400,
        scrape_namespaces=("monitoring",),
    )


def test_defaults_are_the_operators_own(helm: str) -> None:
    settings = load_settings(environment(render(helm, {})))
    chosen = {"namespaces", "namespace", "identity", "runtime_image"}
    assert {field.name for field in fields(Settings) if getattr(settings, field.name) != field.default} == chosen


@pytest.mark.parametrize("guide", ["install", "security"])
def test_values_for_every_run_that_a_guide_shows_are_taken(helm: str, guide: str) -> None:
    text = (ROOT / f"docs/guides/cluster/{guide}.md").read_text()
    (values,) = [
        each for each in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if re.search("^runs:", each, re.MULTILINE)
    ]
    shown = YAML(typ="safe").load(values)
    settings = load_settings(environment(render(helm, shown)))
    assert len(settings.run_egress) == len(shown["runs"]["egress"])
    assert settings.run_pod_labels == shown["runs"]["podLabels"]


def test_the_policies_and_monitors_find_the_pods_that_the_operator_makes(helm: str) -> None:
    """Against the pod that the operator's own code builds for the guide's manifest."""
    text = (ROOT / "docs/guides/cluster/run.md").read_text()
    manifest = next(each for each in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "kind: OrbitRun" in each)
    body = {**YAML(typ="safe").load(manifest), "apiVersion": "orbitrl.dev/v1alpha1"}
    body["metadata"] |= {"namespace": "team-a", "uid": "u"}
    source = RunSource("team-a", "quickstart", "u", body["spec"], OrbitRun.model_validate(body))
    pod = build_job(source, 1, (), Settings())["spec"]["template"]
    labels = pod["metadata"]["labels"].items()
    objects = render(helm, COMBINATIONS["everything"])
    monitor = pick(objects, "PodMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= labels
    assert pick(objects, "PodDisruptionBudget", "orbit-runs")["spec"]["selector"]["matchLabels"].items() <= labels
    assert pick(objects, "NetworkPolicy")["spec"]["egress"][2]["to"][0]["podSelector"]["matchLabels"].items() <= labels
    ports = [port["name"] for port in pod["spec"]["containers"][0]["ports"]]
    assert monitor["podMetricsEndpoints"][0]["port"] in ports
    meta = {f"__meta_kubernetes_pod_label_{re.sub('[^a-z0-9]', '_', name)}": value for name, value in labels}
    made = {
        each["targetLabel"]: meta[each["sourceLabels"][0]] for each in monitor["podMetricsEndpoints"][0]["relabelings"]
    }
    assert made == {"run": "quickstart", "attempt": "1"}


def test_there_is_one_operator_at_a_time(helm: str) -> None:
    spec = pick(render(helm, {}), "Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 30
    assert "priorityClassName" not in pod, "clusters may refuse a class that they keep for their own"


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
