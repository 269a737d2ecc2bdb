"""The whole bed: start, use, orderly end.

Belongs here: the order in which things start and end, and kubectl. Does not belong here: their flags.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.bed import network, services
from cluster.bed.cleanup import FOLDER, RECORD, list_leftovers, remove_leftovers
from cluster.bed.control_plane import ControlPlane
from cluster.bed.images import build_pause_image
from cluster.bed.node import GPU_PRODUCT, NUM_GPUS, PLAIN_TAINT, Node
from cluster.bed.pki import NODES
from cluster.bed.processes import Processes, run
from cluster.bed.programs import check_machine, find_program
from cluster.bed.reaper import reap_after_us

LOCK = Path("/run/lock/orbit-bed")
API_PORT = 6443


@dataclass
class Cluster:
    """A running cluster. Pods and Services answer the tests at their own addresses."""

    plane: ControlPlane
    nodes: list[Node]
    processes: Processes
    folder: Path
    imported: set[tuple[str, Path]] = field(default_factory=set)
    """Node and archive."""

    @property
    def kubeconfig(self) -> Path:
        return self.plane.kubeconfig

    @property
    def buckets(self) -> Path:
        """Folder of the object store: a bucket is a folder in it, an object a file."""
        return self.folder / "buckets"

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        return run(find_program("kubectl"), "--kubeconfig", self.kubeconfig, *words, stdin=stdin)

    def get(self, *words: str) -> dict[str, Any]:
        """`kubectl get ... -o json`."""
        return dict(json.loads(self.kubectl("get", *words, "-o", "json")))

    def apply(self, *objects: dict[str, Any]) -> None:
        """`kubectl apply`, server-side."""
        text = "\n---\n".join(json.dumps(each) for each in objects)
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)

    def import_image(self, archive: Path, *, everywhere: bool = False) -> None:
        """Once, on the nodes with GPUs, or also on the one without."""
        wanted = [node for node in self.nodes if everywhere or node.has_gpus]
        missing = [node for node in wanted if (node.name, archive) not in self.imported]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: node.import_image(archive), missing))
        self.imported |= {(node.name, archive) for node in missing}

    def add_gpus(self, node: Node) -> None:
        """Adds eight GPUs, and what they are, as a device plug-in would."""
        amount = {"nvidia.com/gpu": str(NUM_GPUS)}
        patch = json.dumps({"status": {"capacity": amount, "allocatable": amount}})
        self.kubectl("patch", "node", node.name, "--subresource=status", "--type=merge", "-p", patch)
        labels = [f"nvidia.com/gpu.product={GPU_PRODUCT}", f"nvidia.com/gpu.count={NUM_GPUS}"]
        self.kubectl("label", "node", node.name, "--overwrite", *labels)

    def is_ready(self, node: Node) -> bool:
        try:
            found = self.get("node", node.name)
        except AssertionError:
            return False
        conditions = {each["type"]: each["status"] for each in found["status"].get("conditions", [])}
        return conditions.get("Ready") == "True"


@contextmanager
def hold_machine() -> Iterator[None]:
    """One bed at a time: waits until another has ended.

    What is left of one whose tests were killed is removed by its reaper, and here once more if that was killed too.
    """
    check_machine()
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_leftovers()
        with reap_after_us(lock):
            yield


@contextmanager
def run_cluster(logs: Path) -> Iterator[Cluster]:
    """All nodes, ready, until the end."""
    with hold_machine():
        cluster = _build(logs)
        try:
            _start(cluster)
            yield cluster
        finally:
            stop(cluster)
        assert not (left := list_leftovers()), left


def _build(logs: Path) -> Cluster:
    FOLDER.mkdir(mode=0o755)
    processes = Processes(logs, RECORD, network.NETNS)
    plane = ControlPlane(processes, FOLDER / "plane", network.bridge_address(0), API_PORT, schedules=True)
    nodes = [Node(index, FOLDER / name, plane, processes) for index, name in enumerate(NODES)]
    return Cluster(plane, nodes, processes, FOLDER)


def _start(cluster: Cluster) -> None:
    network.build_network(len(cluster.nodes))
    cluster.plane.start()
    services.start_proxy(cluster.processes, cluster.plane)
    services.start_dns(cluster.processes, cluster.plane, cluster.folder)
    services.start_store(cluster.processes, cluster.buckets)
    pause = build_pause_image()
    for node in cluster.nodes:
        node.start()
        node.import_image(pause)
    for node in cluster.nodes:
        cluster.processes.wait_for(lambda node=node: cluster.is_ready(node), f"{node.name} is Ready", 90)
        if node.has_gpus:
            cluster.add_gpus(node)
        else:
            cluster.kubectl("taint", "node", node.name, PLAIN_TAINT)


def stop(cluster: Cluster) -> None:
    """Kubelets first, so that nobody starts a container again; then containers, with all that is left."""
    cluster.processes.stop_together([node.kubelet for node in cluster.nodes], seconds=5)
    cluster.processes.stop_all()
    remove_leftovers()


def wait_for(probe: Any, what: str, seconds: float = 60.0) -> Any:
    """The first answer that is true. Asks less and less often: many a probe starts a `kubectl`."""
    until, pause = time.monotonic() + seconds, 0.1
    while not (found := probe()):
        assert time.monotonic() < until, f"not within {seconds:.0f} s: {what}"
        time.sleep(pause)
        pause = min(1.3 * pause, 0.6)
    return found
