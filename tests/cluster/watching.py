"""Looking at runs and their pods while something else happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from cluster.bed.cluster import Cluster, wait_for

Object = dict[str, Any]
RUNS = "/apis/orbitrl.dev/v1alpha1/namespaces/{namespace}/orbitruns/{name}"


def read_status(client: httpx.Client, name: str, namespace: str = "team-a") -> Object:
    """Empty where there is no such run, or nothing is known of it."""
    answer = client.get(RUNS.format(namespace=namespace, name=name))
    return dict(answer.json().get("status") or {}) if answer.status_code == 200 else {}


def wait_status(
    cluster: Cluster, name: str, probe: Callable[[Object], object], what: str, seconds: float = 120.0
) -> Object:
    """The first status that is what the probe wants; a failure shows the last one."""
    last: Object = {}

    def look() -> Object | None:
        nonlocal last
        last = read_status(client, name)
        return last if last and probe(last) else None

    with cluster.plane.client() as client:
        try:
            return dict(wait_for(look, f"{name}: {what}", seconds))
        except AssertionError as error:
            raise AssertionError(f"{error}; its status: {last}") from None


@contextmanager
def watch_status(cluster: Cluster, name: str) -> Iterator[list[Object]]:
    """Every status that a person would see who looks three times a second, and the one at the end."""
    seen: list[Object] = []
    over = threading.Event()

    def look() -> None:
        with cluster.plane.client() as client:
            ending = False
            while not ending:
                ending = over.wait(0.3)
                try:
                    status = read_status(client, name)
                except httpx.HTTPError:
                    continue
                if status and (not seen or seen[-1] != status):
                    seen.append(status)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def find_pods(cluster: Cluster, run: str, namespace: str = "team-a") -> list[Object]:
    """The pods of a run, the oldest first."""
    found = cluster.get("pods", "-n", namespace, "-l", f"orbitrl.dev/run-name={run}")["items"]
    return sorted(found, key=lambda pod: int(pod["metadata"]["labels"].get("orbitrl.dev/attempt") or 0))


def holds(status: Object, condition: str) -> bool:
    return any(each["type"] == condition and each["status"] == "True" for each in status.get("conditions", ()))
