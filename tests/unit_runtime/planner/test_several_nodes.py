"""A run over several nodes: what the planner makes of them, and when a process counts them at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from orbit_runtime.errors import ManifestError
from orbit_runtime.model_info.cards import find_card_facts
from orbit_runtime.planner import judge
from orbit_runtime.planner.job import requested_machine
from orbit_runtime.planner.verdict import Verdict
from orbit_runtime.spec import MachineFacts, OrbitRun, load_manifest, resolve
from orbit_runtime.workers.ranks.driver import neighbours_together
from orbit_runtime.workers.system import joined_nodes

EXAMPLES = Path(__file__).parents[3] / "examples"


def flagship(*overrides: str) -> OrbitRun:
    return load_manifest(EXAMPLES / "kimi-k2-6.yaml", ["spec.placement.nodes=3", *overrides])


def judged(run: OrbitRun) -> Verdict:
    machine, model = requested_machine(run), find_card_facts(run.spec.model.uri)
    assert machine is not None
    assert model is not None
    return judge(run, model, machine)


def test_the_engine_has_the_first_node_and_ranks_the_others() -> None:
    made = judged(flagship()).plan
    assert made is not None
    assert made.machine == "3 nodes of 8 x B200"
    assert (list(made.devices.engine), list(made.devices.trainer)) == (list(range(8)), list(range(8, 24)))
    assert (made.trainer, made.layout.num_gpus) == ("Megatron", 16)
    assert 8 % made.layout.tensor == 0, "the parts of a matrix never leave a node"
    assert {gpu for gpus in made.server_devices for gpu in gpus} <= set(range(8))


def test_a_matrix_in_more_parts_than_a_node_has_gpus_is_refused() -> None:
    verdict = judged(flagship("spec.training.parallel={tensor: 16}"))
    assert verdict.accepted is False
    assert verdict.problem is not None
    assert verdict.problem.where == "spec.training.parallel"
    assert "must stay on one node, which has 8 GPUs" in verdict.problem.message


def test_main_memory_is_that_of_a_node_and_not_of_all() -> None:
    def host_bytes(nodes: int) -> int:
        made = judged(flagship(f"spec.placement.nodes={nodes}")).plan
        assert made is not None
        return made.host_bytes

    assert host_bytes(2) == host_bytes(5), "more nodes, as much on each"


@pytest.mark.parametrize(("address", "nodes"), [(None, 1), ("", 1), ("head:6379", 3)])
def test_nodes_count_where_a_ray_cluster_is_named(
    address: str | None, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert joined_nodes(3) == nodes


def test_ranks_that_follow_each_other_share_a_node_however_ray_dealt_the_bundles() -> None:
    dealt = {0: "a", 1: "b", 2: "b", 3: "a", 4: "a", 5: "b"}
    order = neighbours_together(dealt)
    assert sorted(order) == list(range(6))
    assert [dealt[bundle] for bundle in order] == ["a", "a", "a", "b", "b", "b"]


def test_both_fields_that_several_nodes_leave_nothing_to_do_are_named() -> None:
    with pytest.raises(ManifestError) as caught:
        flagship("spec.placement.layout=Split", "spec.placement.trainerGpus=1")
    said = str(caught.value)
    assert "spec.placement.layout" in said
    assert "spec.placement.trainerGpus" in said


@pytest.mark.parametrize(("has_cuda", "num_gpus"), [(False, 0), (True, 1)])
def test_the_trainer_is_on_the_other_nodes_whatever_this_one_has(has_cuda: bool, num_gpus: int) -> None:
    def trainer(nodes: int, *, joins_nodes: bool) -> str:
        run = load_manifest(EXAMPLES / "qwen3-4b.yaml", [f"spec.placement.nodes={nodes}"])
        assert run.spec.training.trainer == "Auto"
        return resolve(run, MachineFacts(has_cuda, num_gpus, joins_nodes)).run.spec.training.trainer

    assert trainer(2, joins_nodes=True) == "Megatron"
    assert trainer(2, joins_nodes=False) == "Torch", "a laptop takes a manifest of several nodes alone"
    assert trainer(1, joins_nodes=True) == "Torch", "ranks beside the run need no cluster, nor one GPU ranks"
