"""The bed itself: what a test may count on, and that nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from cluster.bed.cleanup import FOLDER, list_leftovers, remove_leftovers
from cluster.bed.cluster import LOCK, Cluster, wait_for
from cluster.bed.services import store_environment

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from pathlib import Path
from cluster.bed.cluster import run_cluster
with run_cluster(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(600)
"""


def test_two_nodes_are_ready_with_eight_gpus_each(cluster: Cluster) -> None:
    nodes = cluster.get("nodes")["items"]
    assert [node["metadata"]["name"] for node in nodes] == ["b200-0", "b200-1"]
    assert [node["status"]["allocatable"]["nvidia.com/gpu"] for node in nodes] == ["8", "8"]
    assert {node["metadata"]["labels"]["nvidia.com/gpu.product"] for node in nodes} == {"NVIDIA-B200"}


def test_the_api_server_answers_at_its_service_address(cluster: Cluster) -> None:
    with cluster.plane.client() as client:
        assert wait_for(lambda: client.get("https://10.96.0.1/version").status_code == 200, "kube-proxy has its rules")


def test_the_object_store_answers(cluster: Cluster) -> None:
    answer = httpx.get(store_environment()["AWS_ENDPOINT_URL"], trust_env=False)
    assert answer.status_code == 403, "it knows that nobody signed this"


def test_a_frozen_kubelet_makes_its_node_not_ready_and_its_return_ready_again(cluster: Cluster) -> None:
    lost = cluster.nodes[1]
    lost.freeze()
    try:
        wait_for(lambda: not cluster.is_ready(lost), "the node is NotReady", 60)
        assert cluster.is_ready(cluster.nodes[0])
    finally:
        lost.thaw()
    wait_for(lambda: cluster.is_ready(lost), "the node is Ready again", 60)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_of_a_bed_stays_behind(number: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Ctrl-C ends it in order; after a kill the next one, or `remove_leftovers`, finds everything."""
    if "cluster" in request.session.__dict__.get("_started", ()) or FOLDER.exists():
        pytest.skip("a bed runs in this session: `make test-cluster` runs this test in one of its own")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}"}
    program = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert list_leftovers(), "while it runs there is something to list"
    process.send_signal(number)
    process.wait(60)
    if number == signal.SIGKILL:
        assert list_leftovers(), "its processes outlive the one that started them"
        remove_leftovers()
    assert list_leftovers() == []
    assert not Path("/var/lib/kubelet").exists()
    assert not Path("/var/log/containers").exists()
    LOCK.unlink(missing_ok=True)
