"""What a divided trainer tells of one pass against one process, and which rank, layer and tensor a fault is at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from orbit_runtime.adapters.buffer import publishable
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.parity.locate import Location, locate
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.snapshot import Snapshot, take_snapshot
from orbit_runtime.training import TorchTrainer
from orbit_runtime.training.megatron.groups import Groups, GroupSizes
from orbit_runtime.training.megatron.rank import RankSettings
from orbit_runtime.training.megatron.trainer import MegatronTrainer
from tests.integration.test_torch_trainer import SETTINGS
from tests.megatron.cases import folder_of
from tests.megatron.ranks import World, world
from tests.megatron.trainers import WorldRanks, rank_here
from tests.models.family_matrix import Case, adapter_of

DIVISIONS = {
    "TP2+SP": GroupSizes(2, tensor=2, expert=2, sequence_parallel=True),
    "EP2": GroupSizes(2, expert=2),
    "PP2": GroupSizes(2, pipeline=2),
    "CP2": GroupSizes(2, context=2),
}
CASES = (
    Case("qwen3_moe", "INT4", "LoRA", "PerExpert"),
    Case("deepseek_v3", "BF16", "OFT", "SharedOuter"),
    Case("glm4_moe", "BF16", "LoRA", "SharedOuter"),
)
TOKENS = (5, 9, 3, 77, 20, 31, 64, 2)


@pytest.fixture(scope="module", params=sorted(DIVISIONS))
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    with world(DIVISIONS[request.param]) as made:
        yield made


def both(ranks: World, root: Path, case: Case) -> tuple[MegatronTrainer, Policy]:
    folder, adapter = folder_of(root, case), adapter_of(case)
    settings = RankSettings(folder, adapter, ranks.sizes, SETTINGS)
    return MegatronTrainer(WorldRanks(ranks, settings), SETTINGS.base_model), load_policy(folder, adapter)


def compared(trainer: MegatronTrainer, policy: Policy) -> tuple[Snapshot, Snapshot, Location]:
    """The ranks' snapshot, the one process's in the engine's place, and where the first departs from the second."""
    files = publishable(TorchTrainer(policy, SETTINGS), 0).files
    ours = trainer.snapshot(TOKENS, TRAINER_SLOT, files)
    again = trainer.snapshot(TOKENS, TRAINER_SLOT, files, copies=3)
    theirs = take_snapshot(policy, TOKENS, TRAINER_SLOT, files)
    return ours, theirs, locate(ours, again, theirs, dtype="float32", group=None)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_tell_what_one_process_tells(ranks: World, root: Path, case: Case) -> None:
    ours, theirs, location = compared(*both(ranks, root, case))
    assert list(ours.points) == list(theirs.points)
    for name, values in theirs.points.items():
        assert ours.points[name].shape == values.shape, name
        scale = values.square().mean().sqrt()
        assert (ours.points[name] - values).abs().max() <= 2e-5 * scale, name
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, (wanted,) in theirs.values(list(theirs.tensors)).items():
        assert torch.equal(ours.values((name,))[name][0], wanted), name
    assert location.is_clear, location.sentence()


def spoil_base(groups: Groups, rank: int, name: str) -> None:
    """In one rank's memory a weight of the base is off: what a failing device does."""
    if torch.distributed.get_rank() == rank:
        weight = rank_here().policy.model.get_parameter(name)
        with torch.no_grad():
            weight[0, 0] += 1.0


def spoil_head(groups: Groups) -> None:
    """In the last stage's memory, of a model whose output layer is its embedding."""
    if groups.is_last_stage:
        with torch.no_grad():
            rank_here().policy.model.lm_head.packed.qdata[3, 5] += 1.0


def turn_experts(groups: Groups, rank: int) -> None:
    """One rank believes that its first expert is another one: a wrong offset."""
    if torch.distributed.get_rank() == rank:
        experts = rank_here().policy.model.model.layers[1].mlp.experts
        count = len(experts.held)
        experts.held = range(experts.held.start - count, experts.held.stop - count)


@pytest.mark.timeout(900)
def test_a_wrong_weight_in_one_rank_is_named_with_that_rank(ranks: World, root: Path) -> None:
    trainer, policy = both(ranks, root, CASES[0])
    # Held by every rank of the layer whole: where there is another one, it has it right.
    ranks.call(spoil_base, 1, "model.layers.1.mlp.gate.weight")
    _, _, location = compared(trainer, policy)
    details = [cause.detail for cause in location.causes if cause.name == "model.layers.1.mlp.gate.weight"]
    alone = ranks.sizes.pipeline > 1
    named = "rank 1 of the trainer holds it" if alone else "ranks 0 and 1 of the trainer hold different values"
    assert any(named in each for each in details), location.causes


@pytest.mark.timeout(900)
def test_a_wrong_offset_of_one_ranks_experts_is_found_in_that_layer(ranks: World, root: Path) -> None:
    if ranks.sizes.expert == 1:
        pytest.skip("every rank holds all experts of its layers")
    trainer, policy = both(ranks, root, CASES[0])
    ranks.call(turn_experts, 1)
    _, _, location = compared(trainer, policy)
    assert location.point is not None
    assert location.point.startswith("model.layers.1.mlp"), location.sentence()
    named = {cause.name for cause in location.causes}
    assert any(name.startswith("model.layers.1.mlp.experts.") for name in named), named


@pytest.mark.timeout(900)
def test_two_stages_that_hold_one_matrix_for_two_uses_are_held_against_each_other(ranks: World) -> None:
    if ranks.sizes.pipeline == 1:
        pytest.skip("one stage holds embedding and output layer")
    folder, adapter = builtin_folder("tiny-adder", "BF16"), AdapterConfig("LoRA", (), rank=4, alpha=8.0)
    trainer = MegatronTrainer(WorldRanks(ranks, RankSettings(folder, adapter, ranks.sizes, SETTINGS)), "base")
    policy = load_policy(folder, adapter)
    assert compared(trainer, policy)[2].is_clear
    ranks.call(spoil_head)
    _, _, location = compared(trainer, policy)
    details = [cause.detail for cause in location.causes if cause.name == "model.embed_tokens.weight"]
    assert any("ranks 0 and 1 of the trainer hold different values" in each for each in details), location.causes
