"""What Prometheus' own Kubernetes discovery finds, as files that it reads: Debian builds Prometheus without it.

Belongs here: roles `pod` and `endpoints`, with the labels that Prometheus documents for them. Does not belong here:
choosing among what is found: the monitors' relabelling does that, inside Prometheus.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from cluster.bed.cluster import Cluster

Object = dict[str, Any]
META = "__meta_kubernetes_"


@contextmanager
def keep_discovering(cluster: Cluster, files: Mapping[Path, Object]) -> Iterator[None]:
    """Writes candidates for each monitor into its file, whenever they change; the first time before it returns."""
    over = threading.Event()

    def look(client: httpx.Client) -> None:
        for file, monitor in files.items():
            text = json.dumps(find_candidates(client, monitor), indent=1)
            if not file.exists() or file.read_text() != text:
                staging = file.with_suffix(".part")
                staging.write_text(text)
                staging.rename(file)

    def keep_looking() -> None:
        with cluster.plane.client() as client:
            while not over.wait(2):
                try:
                    look(client)
                except httpx.HTTPError:
                    continue

    with cluster.plane.client() as client:
        look(client)
    thread = threading.Thread(target=keep_looking)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def find_candidates(client: httpx.Client, monitor: Object) -> list[Object]:
    """Everything of the monitor's kind in the namespaces that it names."""
    selector = monitor["spec"].get("namespaceSelector") or {}
    names = None if selector.get("any") else selector.get("matchNames") or [monitor["metadata"]["namespace"]]
    places = [""] if names is None else [f"/namespaces/{name}" for name in names]
    found = []
    for place in places:
        pods = _items(client, f"/api/v1{place}/pods")
        if monitor["kind"] == "PodMonitor":
            found += [target for pod in pods for target in from_pod(pod)]
            continue
        services = {each["metadata"]["name"]: each for each in _items(client, f"/api/v1{place}/services")}
        slices = _items(client, f"/apis/discovery.k8s.io/v1{place}/endpointslices")
        by_name = {pod["metadata"]["name"]: pod for pod in pods}
        found += [target for each in slices for target in from_endpoints(each, services, by_name)]
    return sorted(found, key=lambda target: (target["targets"], sorted(target["labels"].items())))


def from_pod(pod: Object) -> list[Object]:
    """One candidate for each port of each container."""
    address = pod["status"].get("podIP")
    return [
        _target(address, port["containerPort"], {**_pod_labels(pod), f"{META}pod_container_name": container["name"],
                                                 f"{META}pod_container_port_name": port.get("name", "")})
        for container in pod["spec"]["containers"] for port in container.get("ports", ()) if address
    ]  # fmt: skip


def from_endpoints(each: Object, services: Mapping[str, Object], pods: Mapping[str, Object]) -> list[Object]:
    """One candidate for each address and port behind a Service."""
    name = each["metadata"]["labels"].get("kubernetes.io/service-name", "")
    service = services.get(name)
    if service is None:
        return []
    found = []
    for endpoint in each.get("endpoints") or ():
        pod = pods.get((endpoint.get("targetRef") or {}).get("name", ""))
        labels = {f"{META}namespace": each["metadata"]["namespace"], f"{META}service_name": name}
        labels |= _labels("service", service)
        labels |= {} if pod is None else _pod_labels(pod)
        for port in each.get("ports") or ():
            more = {f"{META}endpoint_port_name": port.get("name") or ""}
            found += [_target(address, port["port"], {**labels, **more}) for address in endpoint["addresses"]]
    return found


def sanitise(label: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", label)


def _pod_labels(pod: Object) -> dict[str, str]:
    own = {"namespace": pod["metadata"]["namespace"], "pod_name": pod["metadata"]["name"],
           "pod_phase": pod["status"].get("phase", "Pending")}  # fmt: skip
    return {**{f"{META}{name}": value for name, value in own.items()}, **_labels("pod", pod)}


def _labels(kind: str, body: Object) -> dict[str, str]:
    found = {}
    for label, value in (body["metadata"].get("labels") or {}).items():
        found[f"{META}{kind}_label_{sanitise(label)}"] = value
        found[f"{META}{kind}_labelpresent_{sanitise(label)}"] = "true"
    return found


def _target(address: str, port: int, labels: dict[str, str]) -> Object:
    return {"targets": [f"{address}:{port}"], "labels": labels}


def _items(client: httpx.Client, path: str) -> list[Object]:
    answer = client.get(path)
    answer.raise_for_status()
    return list(answer.json()["items"])
