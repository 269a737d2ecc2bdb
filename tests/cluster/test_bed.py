"""The bed itself: what a test may count on. That a node can be lost and come back: `test_node_real_runs`."""

from __future__ import annotations

import httpx
import pytest
from cluster.bed.cluster import Cluster, wait_for
from cluster.bed.control_plane import SERVICE_ADDRESS
from cluster.bed.services import store_environment

pytestmark = pytest.mark.cluster


def test_three_nodes_are_ready_two_of_them_with_eight_gpus(cluster: Cluster) -> None:
    nodes = cluster.get("nodes")["items"]
    assert [node["metadata"]["name"] for node in nodes] == ["b200-0", "b200-1", "cpu-0"]
    assert [node["status"]["allocatable"].get("nvidia.com/gpu") for node in nodes] == ["8", "8", None]
    products = [node["metadata"]["labels"].get("nvidia.com/gpu.product") for node in nodes]
    assert products == ["NVIDIA-B200", "NVIDIA-B200", None]


def test_the_api_server_answers_at_its_service_address(cluster: Cluster) -> None:
    def answers() -> bool:
        try:
            return client.get(f"https://{SERVICE_ADDRESS}/version").status_code == 200
        except httpx.TransportError:
            return False  # Until kube-proxy has its rules nobody is there.

    with cluster.plane.client() as client:
        assert wait_for(answers, "kube-proxy has its rules")


def test_the_object_store_answers(cluster: Cluster) -> None:
    answer = httpx.get(store_environment()["AWS_ENDPOINT_URL"], trust_env=False)
    assert answer.status_code == 403, "it knows that nobody signed this"
