"""A real Prometheus that finds its targets as the chart's own ServiceMonitor and PodMonitor say.

Belongs here: turning monitors into the configuration that the Prometheus operator would write, and asking questions.
Does not belong here: what the answers should be.

The operator itself is not here (its image cannot be pulled); its CRDs are the real ones. A field of a monitor that is
not translated is refused, so that the chart cannot come to rely on one that was never tried.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from chart.kube_schemas import MONITORS, PROMETHEUS_OPERATOR, module_folder
from cluster.bed.cluster import Cluster
from cluster.bed.network import bridge_address
from cluster.bed.programs import find_program
from cluster.discovery import keep_discovering, sanitise

from tools.chart.grafana import all_panels

Object = dict[str, Any]
PORT = 9090
SOURCE = "example/prometheus-operator-crd/monitoring.coreos.com_{plural}.yaml"


def install_monitoring_crds(cluster: Cluster, scratch: Path) -> None:
    """The Prometheus operator's own, as an administrator has them installed already."""
    module = module_folder("github.com/prometheus-operator/prometheus-operator", PROMETHEUS_OPERATOR, scratch)
    files = [word for plural in MONITORS for word in ("-f", str(module / SOURCE.format(plural=plural)))]
    cluster.kubectl("apply", "--server-side", *files)
    cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")


@dataclass(frozen=True)
class Prometheus:
    """One that runs."""

    url: str
    started: float

    def ask(self, path: str, **query: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=query, trust_env=False, timeout=30)
        assert answer.status_code == 200, f"{query}: {answer.text[:500]}"
        return answer.json()["data"]

    def series(self, expression: str, step: float = 2.0) -> list[Object]:
        """What a panel over the whole time since the start would draw."""
        span = {"start": f"{self.started:.0f}", "end": f"{time.time():.0f}", "step": f"{step:g}s"}
        found = self.ask("query_range", query=expression, **span)["result"]
        return [each for each in found if any(value != "NaN" for _, value in each["values"])]

    def targets(self) -> dict[str, list[Object]]:
        """The scraped targets, by scrape job."""
        found: dict[str, list[Object]] = {}
        for target in self.ask("targets", state="active")["activeTargets"]:
            found.setdefault(target["scrapePool"], []).append(target)
        return found


@contextmanager
def run_prometheus(cluster: Cluster) -> Iterator[Prometheus]:
    """Reads the chart's monitors and rules from the API server and scrapes what they select, until the end."""
    folder = cluster.folder / "prometheus"
    folder.mkdir()
    rules = cluster.get("prometheusrules", "--all-namespaces")["items"]
    groups = [group for rule in rules for group in rule["spec"]["groups"]]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    kinds = ("servicemonitors", "podmonitors")
    monitors = [monitor for kind in kinds for monitor in cluster.get(kind, "--all-namespaces")["items"]]
    files = {folder / f"targets-{index}.json": monitor for index, monitor in enumerate(monitors)}
    config = {
        "global": {"evaluation_interval": "2s"},
        "rule_files": [str(folder / "rules.yaml")],
        "scrape_configs": [build_scrape(monitor, str(file)) for file, monitor in files.items()],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"{bridge_address(0)}:{PORT}"
    with keep_discovering(cluster, files):
        cluster.processes.start("prometheus", find_program("prometheus"), {
            "config.file": folder / "prometheus.yaml", "storage.tsdb.path": folder / "data",
            "web.listen-address": address,
        })  # fmt: skip
        prometheus = Prometheus(f"http://{address}", time.time())
        try:
            cluster.processes.wait_for(lambda: _is_ready(prometheus), "Prometheus is ready")
            yield prometheus
        finally:
            cluster.processes.stop("prometheus")


def _is_ready(prometheus: Prometheus) -> bool:
    try:
        return httpx.get(f"{prometheus.url}/-/ready", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def build_scrape(monitor: Object, targets: str) -> Object:
    """One scrape configuration out of one monitor, as `prometheus-operator` v0.76 writes it.

    Only the list of candidates comes from a file instead of `kubernetes_sd_configs` (`discovery`).
    """
    spec, head = dict(monitor["spec"]), monitor["metadata"]
    is_pods = monitor["kind"] == "PodMonitor"
    (endpoint,) = spec.pop("podMetricsEndpoints" if is_pods else "endpoints")
    names = spec.pop("namespaceSelector", {})
    assert set(names) <= {"matchNames", "any"}, names
    kind, name = ("podMonitor", "pod") if is_pods else ("serviceMonitor", "service")
    scrape = {
        "job_name": f"{kind}/{head['namespace']}/{head['name']}/0",
        "file_sd_configs": [{"files": [targets]}],
        "honor_labels": endpoint.pop("honorLabels", False),
        "scrape_interval": endpoint.pop("interval"),
        "scrape_timeout": "2s",
        "relabel_configs": [
            *_keep_labelled(spec.pop("selector"), name),
            *_common_labels(endpoint.pop("port"), head, is_pods),
            *map(_relabeling, endpoint.pop("relabelings", [])),
        ],
        "metric_relabel_configs": [_relabeling(each) for each in endpoint.pop("metricRelabelings", [])],
    }
    if "sampleLimit" in spec:
        scrape["sample_limit"] = spec.pop("sampleLimit")
    assert not spec, f"not translated: {spec}"
    assert not endpoint, f"not translated: {endpoint}"
    return scrape


def _keep_labelled(selector: Mapping[str, Any], name: str) -> list[Object]:
    assert set(selector) <= {"matchLabels", "matchExpressions"}, selector
    found = []
    for label, value in sorted(selector["matchLabels"].items()):
        place = f"__meta_kubernetes_{name}_label{{}}_{sanitise(label)}"
        labels = [place.format(""), place.format("present")]
        found.append({"action": "keep", "source_labels": labels, "regex": f"({value});true"})
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] == "Exists", each
        present = f"__meta_kubernetes_{name}_labelpresent_{sanitise(each['key'])}"
        found.append({"action": "keep", "source_labels": [present], "regex": "true"})
    return found


def _common_labels(port: str, head: Mapping[str, Any], is_pods: bool) -> list[Object]:
    where = "pod_container_port_name" if is_pods else "endpoint_port_name"
    copied = {"namespace": "namespace", "pod_name": "pod", "pod_container_name": "container"}
    job: Object = {"target_label": "job", "replacement": f"{head['namespace']}/{head['name']}"}
    if not is_pods:
        copied["service_name"] = "service"
        job = {"target_label": "job", "source_labels": ["__meta_kubernetes_service_name"]}
    return [
        {"action": "keep", "source_labels": [f"__meta_kubernetes_{where}"], "regex": port},
        {"action": "drop", "source_labels": ["__meta_kubernetes_pod_phase"], "regex": "(Failed|Succeeded)"},
        *({"source_labels": [f"__meta_kubernetes_{each}"], "target_label": to} for each, to in copied.items()),
        job,
        {"target_label": "endpoint", "replacement": port},
    ]


def _relabeling(each: Mapping[str, Any]) -> Object:
    words = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    assert set(each) <= {*words, "action", "regex", "replacement", "separator", "modulus"}, each
    return {words.get(name, name): value for name, value in each.items()}


def read_panels(cluster: Cluster, variables: Mapping[str, str]) -> list[tuple[str, str]]:
    """`dashboard: panel` and query, from the ConfigMaps that Grafana's sidecar would load."""
    found = []
    for config in cluster.get("configmaps", "--all-namespaces", "-l", "grafana_dashboard=1")["items"]:
        for text in config["data"].values():
            dashboard = json.loads(text)
            for panel in all_panels(dashboard):
                for target in panel.get("targets", ()):
                    found.append((f"{dashboard['title']}: {panel['title']}", _fill(target["expr"], variables)))
    return found


def _fill(query: str, variables: Mapping[str, str]) -> str:
    for name, value in sorted(variables.items(), key=lambda each: -len(each[0])):
        query = query.replace(f"${name}", value)
    assert "$" not in query, query
    return query
