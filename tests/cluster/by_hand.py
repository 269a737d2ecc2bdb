"""A real API server with its real controllers, and a kubelet that is this file.

Pods are made by the real Job controller and removed by the real collector; what a node would do (place them, start
them, end them) is done here, at once and on purpose. Nothing of the operator is replaced.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from orbit_runtime.spec import load_manifest
from orbit_runtime.spec.crd import build_crd

ROOT = Path(__file__).parents[2]
RUNS = "/apis/orbitrl.dev/v1alpha1"
Object = dict[str, Any]


class Server:
    """The API server, as an administrator sees it."""

    def __init__(self, kubeconfig: str) -> None:
        self.kubeconfig = kubeconfig
        config = yaml.safe_load(Path(kubeconfig).read_text(encoding="utf-8"))
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._http = httpx.Client(
            base_url=cluster["server"],
            verify=False,
            headers={"Authorization": f"Bearer {user['token']}"},
            trust_env=False,
            timeout=20,
            limits=httpx.Limits(max_connections=64),
        )

    def get(self, path: str, **query: str) -> Object | None:
        """`None` where there is nothing. Right after a CRD came the server asks to be asked again in a second."""
        for _ in range(30):
            answer = self._http.get(path, params=query)
            if answer.status_code != 429:
                break
            time.sleep(float(answer.headers.get("Retry-After", 1)))
        return None if answer.status_code == 404 else self._read(answer)

    def items(self, path: str, **query: str) -> list[Object]:
        found = self.get(path, **query)
        return [] if found is None else found["items"]

    def apply(self, path: str, body: Object) -> Object:
        query = {"fieldManager": "test", "force": "true"}
        head = {"Content-Type": "application/apply-patch+yaml"}
        return self._read(self._http.patch(path, params=query, content=json.dumps(body), headers=head))

    def merge(self, path: str, body: Object) -> Object | None:
        head = {"Content-Type": "application/merge-patch+json"}
        answer = self._http.patch(path, content=json.dumps(body), headers=head)
        return None if answer.status_code == 404 else self._read(answer)

    def create(self, path: str, body: Object) -> Object:
        return self._read(self._http.post(path, json=body))

    def delete(self, path: str, grace: int | None = None) -> None:
        body = {} if grace is None else {"gracePeriodSeconds": grace}
        body["propagationPolicy"] = "Background"  # type: ignore[assignment]
        self._http.request("DELETE", path, json=body)

    def _read(self, answer: httpx.Response) -> Object:
        assert answer.status_code < 300, f"{answer.status_code} {answer.request.url}: {answer.text[:500]}"
        return dict(answer.json())


def connect(kubeconfig: Path) -> Server:
    """Connects as an administrator; the server knows OrbitRuns then. A CRD that is there already is its owner's."""
    server = Server(str(kubeconfig))
    crd = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/orbitruns.orbitrl.dev"
    if server.get(crd) is None:
        server.apply(crd, build_crd())
    wait_for(lambda: server.get(RUNS), "the CRD is served")
    return server


def wait_for[T](probe: Callable[[], T | None], what: str, seconds: float = 90.0) -> T:
    """The first answer that is true. Asks less and less often: who asks takes the time of those who are waited for."""
    deadline, pause = time.monotonic() + seconds, 0.02
    while True:
        found = probe()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(pause)
        pause = min(1.3 * pause, 0.25)


@contextmanager
def repeated(act: Callable[[], None], pause: float) -> Iterator[None]:
    """Acts every so many seconds, in a thread, until the end of the block."""
    over = threading.Event()

    def keep_acting() -> None:
        while not over.wait(pause):
            try:
                act()
            except (AssertionError, httpx.HTTPError):
                continue  # The object moved on meanwhile, or the server is away: look again.

    thread = threading.Thread(target=keep_acting, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass
class Team:
    """One namespace with a kubelet of its own."""

    server: Server
    namespace: str
    exits: dict[int, int] = field(default_factory=dict)
    """Attempt: exit code with which its container ends by itself, once it runs."""
    exits_when_deleted: int = 75
    lost_nodes: set[str] = field(default_factory=set)
    history: list[tuple[str, ...]] = field(default_factory=list)
    """Names of live pods, whenever they changed."""

    def path(self, kind: str, name: str = "", sub: str = "") -> str:
        prefix = {"orbitruns": RUNS, "jobs": "/apis/batch/v1"}.get(kind, "/api/v1")
        return "/".join(filter(None, [prefix, "namespaces", self.namespace, kind, name, sub]))

    def build_run(self, name: str, **spec: Any) -> Object:
        """The quickstart's manifest with these blocks."""
        manifest = load_manifest(ROOT / "examples" / "quickstart.yaml").to_manifest()
        manifest["metadata"] = {"name": name, "namespace": self.namespace}
        manifest["spec"] |= {"storage": {"uri": "s3://runs"}, **spec}
        return manifest

    def start_run(self, name: str, **spec: Any) -> None:
        self.server.create(self.path("orbitruns"), self.build_run(name, **spec))

    def edit_run(self, name: str, **spec: Any) -> None:
        self.server.merge(self.path("orbitruns", name), {"spec": spec})

    def status(self, name: str) -> Object:
        found = self.server.get(self.path("orbitruns", name))
        return {} if found is None else found.get("status") or {}

    def wait_phase(self, name: str, *phases: str, seconds: float = 120.0) -> Object:
        def probe() -> Object | None:
            status = self.status(name)
            return status if status.get("phase") in phases else None

        try:
            return wait_for(probe, f"{name} is {' or '.join(phases)}", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; its status: {json.dumps(self.status(name))[:3000]}") from None

    def jobs(self) -> list[str]:
        return sorted(job["metadata"]["name"] for job in self.server.items(self.path("jobs")))

    def pods(self) -> list[Object]:
        return self.server.items(self.path("pods"))

    def events(self) -> list[str]:
        return [event["reason"] for event in self._events()]

    def tellings(self, run: str) -> list[str]:
        """What was told of one run, in words."""
        return [event["message"] for event in self._events() if event["involvedObject"]["name"] == run]

    def _events(self) -> list[Object]:
        items = self.server.items(self.path("events"))
        return [event for event in items if event["involvedObject"]["kind"] == "OrbitRun"]

    def act_as_kubelet(self) -> None:
        """One look at every pod: place it, start it, end it."""
        pods = self.pods()
        live = tuple(
            sorted(pod["metadata"]["name"] for pod in pods if pod["status"].get("phase") in ("Pending", "Running"))
        )
        if not self.history or self.history[-1] != live:
            self.history.append(live)
        for pod in pods:
            self._move(pod)

    def show_life(self) -> None:
        """A node that says nothing is not ready after a while."""
        for index in (0, 1):
            if f"{self.namespace}-n{index}" not in self.lost_nodes:
                set_ready(self.server, f"{self.namespace}-n{index}", True)

    def _move(self, pod: Object) -> None:
        head, status = pod["metadata"], pod["status"]
        node = pod["spec"].get("nodeName")
        if node in self.lost_nodes:
            return
        attempt = int(head["labels"].get("orbitrl.dev/attempt") or 0)
        if status.get("phase") in ("Succeeded", "Failed"):
            if "deletionTimestamp" in head:
                self.server.delete(self.path("pods", head["name"]), grace=0)
        elif "deletionTimestamp" in head:
            self.end(pod, self.exits_when_deleted)
        elif node is None:
            if pod["spec"]["schedulerName"] != "default-scheduler":
                return  # A real one places it.
            target = {"apiVersion": "v1", "kind": "Node", "name": f"{self.namespace}-n{attempt % 2}"}
            body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": head["name"]}, "target": target}
            self.server.create(self.path("pods", head["name"], "binding"), body)
        elif status.get("phase") == "Pending":
            self.write(pod, "Running", {"running": {"startedAt": now()}}, is_ready=True)
        elif attempt in self.exits:
            self.end(pod, self.exits[attempt])

    def end(self, pod: Object, code: int, message: str = "") -> None:
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "message": message, "finishedAt": now(),
                 "startedAt": now()}  # fmt: skip
        self.write(pod, "Failed" if code else "Succeeded", {"terminated": ended}, is_ready=False)

    def write(self, pod: Object, phase: str, state: Object, *, is_ready: bool) -> None:
        name = pod["spec"]["containers"][0]["name"]
        container = {"name": name, "image": "x", "imageID": "", "restartCount": 0, "ready": is_ready, "state": state}
        ready = {"type": "Ready", "status": str(is_ready), "lastTransitionTime": now()}
        placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": now()}
        body = {"status": {"phase": phase, "containerStatuses": [container], "conditions": [ready, placed]}}
        self.server.merge(self.path("pods", pod["metadata"]["name"], "status"), body)


@contextmanager
def open_team(server: Server, name: str) -> Iterator[Team]:
    """A new namespace whose pods are moved until the end, when it is deleted."""
    namespace = f"{name}-{os.urandom(3).hex()}"
    server.apply(
        f"/api/v1/namespaces/{namespace}", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    )
    account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
    wait_for(lambda: server.get(account), "the namespace has its service account")
    for index in (0, 1):
        name = f"{namespace}-n{index}"
        server.apply(f"/api/v1/nodes/{name}", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        set_ready(server, name, True)
    team, beat = Team(server, namespace), 0.0

    def move() -> None:
        nonlocal beat
        team.act_as_kubelet()
        if time.monotonic() - beat > 4.0:
            beat = time.monotonic()
            team.show_life()

    try:
        with repeated(move, 0.2):
            yield team
    finally:
        for run in server.items(team.path("orbitruns")):
            server.merge(team.path("orbitruns", run["metadata"]["name"]), {"metadata": {"finalizers": None}})
        for pod in team.pods():
            server.delete(team.path("pods", pod["metadata"]["name"]), grace=0)
        server.delete(f"/api/v1/namespaces/{namespace}")
        for index in (0, 1):
            server.delete(f"/api/v1/nodes/{namespace}-n{index}")


def set_ready(server: Server, node: str, ready: bool) -> None:
    condition = {"type": "Ready", "status": "True" if ready else "Unknown", "reason": "ByHand", "message": "",
                 "lastHeartbeatTime": now(), "lastTransitionTime": now()}  # fmt: skip
    server.merge(f"/api/v1/nodes/{node}/status", {"status": {"conditions": [condition]}})


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
