"""A group over two nodes of an existing cluster: two node agents of Ray on this machine."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from orbit_runtime.errors import CollectiveError
from orbit_runtime.workers.ranks.group import GroupSettings, RankGroup, start_ranks

pytestmark = [pytest.mark.usefixtures("marked"), pytest.mark.timeout(240)]


def step_for_ever(ranks: RankGroup) -> None:
    while True:
        ranks.call("step", 1)


def test_a_group_works_over_two_nodes_loses_one_and_starts_again_on_the_other(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    def group(count: int) -> GroupSettings:
        return GroupSettings("ranks.targets:Meeting", {}, count, address=cluster.address, nodes=count)

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 1 << 27, "include_dashboard": False}
    )
    try:
        second = cluster.add_node(num_cpus=1, object_store_memory=1 << 27)
        ranks = start_ranks(group(2), tmp_path / "two")
        assert ranks.call("add", 2.0) == [2.0, 2.0]
        threading.Timer(1.0, cluster.remove_node, [second, False]).start()
        with pytest.raises(CollectiveError) as caught:
            step_for_ever(ranks)
        assert "was lost with its node" in str(caught.value)
        assert caught.value.about["rank"] in (0, 1)
        with start_ranks(group(1), tmp_path / "one") as alone:
            assert alone.call("step", 1) == [0.0]
    finally:
        cluster.shutdown()
