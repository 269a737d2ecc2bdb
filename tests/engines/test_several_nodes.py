"""Ranks on nodes of their own: two node agents of Ray on this machine, which the run joins, and SGLang beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.whole_runs import end_runs, log_of, start_run, wait_for_step

pytestmark = pytest.mark.timeout(2400)


def test_a_run_over_two_nodes_loses_one_and_goes_on_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 1 << 27, "include_dashboard": False}
    )
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    out = tmp_path / "run"
    settings = ("spec.placement={nodes: 3, gpus: 0}", "spec.training.steps=4")
    try:
        nodes = [cluster.add_node(num_cpus=1, object_store_memory=1 << 27) for _ in range(2)]
        run = start_run("ranks.yaml", out, *settings)
        wait_for_step(out, 2, run, seconds=900)
        assert f"on 2 nodes of the Ray cluster at {cluster.address}" in log_of(out).read_text()
        cluster.remove_node(nodes[1], False)
        assert run.wait(300) == 81, log_of(out).read_text()[-3000:]
        said = log_of(out).read_text()
        assert "was lost with its node" in said
        assert "Traceback" not in said
        cluster.add_node(num_cpus=1, object_store_memory=1 << 27)
        again = start_run("ranks.yaml", out, *settings)
        assert again.wait(1200) == 0, log_of(out).read_text()[-3000:]
    finally:
        end_runs()
        cluster.shutdown()
