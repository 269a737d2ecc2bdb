"""Runs on the real node: a namespace with an operator of its own, and an image whose `orbit` does as it is told.

Belongs here: what tests on the node share. Does not belong here: starting the node (`bed`), or playing a kubelet
(`by_hand`).
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.bed.cluster import Cluster
from cluster.bed.images import BASE_IMAGE, build_base_image, build_image, images_folder, save_image
from cluster.bed.node import Node
from cluster.by_hand import ROOT, Object, Server, Team, connect, wait_for
from cluster.operator_process import Operator, run_operator
from cluster.restricted_job import build_namespace

SCRIPT = ROOT / "tests" / "fakes" / "scripted_orbit.py"
SCRIPTED = "localhost/orbit-scripted:1"
PATIENCE = 240.0
"""Seconds for what happens beside other tests: two cores are shared by all that lives at the same time."""
QUICK = {
    "ORBIT_OPERATOR_NODE_LOST_SECONDS": "3", "ORBIT_OPERATOR_RESYNC_SECONDS": "2", "ORBIT_OPERATOR_POLL_SECONDS": "1",
    "ORBIT_OPERATOR_PROGRESS_SECONDS": "1", "ORBIT_OPERATOR_RUNTIME_IMAGE": SCRIPTED,
    # Dozens of pods that wait, on two cores.
    "ORBIT_OPERATOR_RUN_CPU_PER_GPU": "0",
}  # fmt: skip


def build_scripted_image() -> Path:
    """The local base and `fakes/scripted_orbit.py` as its `orbit` and `ray`; returns the archive."""
    lines = (f"FROM {BASE_IMAGE}", *(f"ADD orbit /usr/local/bin/{name}" for name in ("orbit", "ray")))
    recipe = "\n".join(lines).encode() + SCRIPT.read_bytes()
    archive = images_folder() / f"scripted-{hashlib.sha256(recipe).hexdigest()[:12]}.tar"
    if not archive.exists():
        build_base_image()
        with tempfile.TemporaryDirectory(dir=images_folder()) as name:
            folder = Path(name)
            (folder / "orbit").write_text(f"#!/usr/local/bin/python3 -ES\n{SCRIPT.read_text(encoding='utf-8')}")
            (folder / "orbit").chmod(0o755)
            (folder / "Containerfile").write_text("\n".join(lines) + "\n")
            build_image(folder, SCRIPTED)
            save_image(SCRIPTED, archive)
    return archive


@contextmanager
def open_real_team(cluster: Cluster, name: str, log: Path, **settings: str) -> Iterator[tuple[Team, Operator]]:
    """A namespace for restricted pods, and an operator that reacts quickly. Both end with the block."""
    server = connect(cluster.kubeconfig)
    cluster.apply(build_namespace(name))
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    wait_for(lambda: server.get(account), "the namespace has its service account")
    team = Team(server, name)
    try:
        with run_operator(team, log, **{**QUICK, **settings}) as operator:
            yield team, operator
    finally:
        for run in server.items(team.path("orbitruns")):
            server.delete(team.path("orbitruns", run["metadata"]["name"]))
        for pod in team.pods():
            server.merge(team.path("pods", pod["metadata"]["name"]), {"metadata": {"finalizers": None}})
            server.delete(team.path("pods", pod["metadata"]["name"]), grace=1)
        server.delete(f"/api/v1/namespaces/{name}")
        wait_for(lambda: server.get(f"/api/v1/namespaces/{name}") is None, f"namespace {name} goes", 60)


def start_scripted(team: Team, name: str, told: Object, **spec: Any) -> None:
    """A run whose `orbit` does what `told` says; without GPUs, unless they are asked for."""
    environment = {
        "rewards": [{"name": "told", "type": "ExactMatch", "arguments": told}],
        **spec.pop("environment", {}),
    }
    fields: Object = {"placement": {"gpus": 0}, "environment": environment, **spec}
    fields["lifecycle"] = {"terminationGracePeriodSeconds": 5, **fields.get("lifecycle", {})}
    team.start_run(name, **fields)


def find_pod(team: Team, run: str, attempt: int = 1) -> Object | None:
    labels = {"orbitrl.dev/run-name": run, "orbitrl.dev/attempt": str(attempt)}
    return next((pod for pod in team.pods() if labels.items() <= pod["metadata"]["labels"].items()), None)


def wait_for_pod(team: Team, run: str, attempt: int = 1, phase: str = "Running", seconds: float = 90) -> Object:
    def probe() -> Object | None:
        pod = find_pod(team, run, attempt)
        return pod if pod is not None and pod["status"].get("phase") == phase else None

    return wait_for(probe, f"the pod of attempt {attempt} of {run} is {phase}", seconds)


def wait_reason(team: Team, run: str, reason: str, seconds: float = 90, says: str = "") -> Object:
    """The first message for that reason that has these words."""

    def probe() -> Object | None:
        status = team.status(run)
        return status if status.get("reason") == reason and says in status["message"] else None

    try:
        return wait_for(probe, f"{run}: {reason}", seconds)
    except AssertionError as error:
        raise AssertionError(f"{error}; its status: {team.status(run)}") from None


def node_of(cluster: Cluster, pod: Object) -> Node:
    return next(node for node in cluster.nodes if node.name == pod["spec"]["nodeName"])


def container_of(pod: Object) -> str:
    """Its id, as containerd knows it."""
    (status,) = pod["status"]["containerStatuses"]
    return str(status["containerID"]).rpartition("/")[2]


def read_log(cluster: Cluster, pod: Object) -> str:
    """From the node's disk: a kubelet that is frozen gives no log."""
    head = pod["metadata"]
    folder = node_of(cluster, pod).folder / "pod-logs" / f"{head['namespace']}_{head['name']}_{head['uid']}" / "run"
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.log")))


def server_of(cluster: Cluster) -> Server:
    return Server(str(cluster.kubeconfig))
