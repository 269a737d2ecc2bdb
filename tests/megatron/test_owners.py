"""Which rank of those that hold a parameter updates it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from orbit_runtime.policy import load_policy
from orbit_runtime.training import TorchTrainer
from orbit_runtime.training.megatron.groups import Groups, GroupSizes
from orbit_runtime.training.megatron.rank import RankSettings
from orbit_runtime.training.megatron.trainer import MegatronTrainer
from orbit_runtime.training.state import MOMENTS, PART
from tests.fakes.held_state import hold_state
from tests.megatron.cases import folder_of
from tests.megatron.ranks import world
from tests.megatron.test_trainer import TRAINING, apart, step
from tests.megatron.trainers import WorldRanks, rank_here
from tests.models.family_matrix import Case, adapter_of

Values = tuple[str, str]
"""A parameter and the part of it: ranks with the same two hold the same values."""


def holds(groups: Groups) -> tuple[dict[Values, int], dict[Values, int]]:
    """Values held, and values that there are moments of, with their number."""
    rank = rank_here()
    masters = rank.policy.injected.masters
    held, moments = {}, {}
    for name, master in masters.parameters.items():
        place = masters.places[name]
        values = (name, "" if place.is_whole else str(place.part))
        held[values] = master.numel()
        state = rank._updater.optimizer.state.get(master, {})
        if state:
            moments[values] = sum(state[moment].numel() for moment in MOMENTS) // len(MOMENTS)
    return held, moments


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "sizes",
    [GroupSizes(4, tensor=2, expert=2, sequence_parallel=True), GroupSizes(4, expert=4), GroupSizes(4, pipeline=2)],
    ids=str,
)
def test_moments_exist_once_and_every_rank_has_its_share_of_them(sizes: GroupSizes, root: Path) -> None:
    case = Case("qwen3_moe", "INT4", "LoRA", "SharedOuter")
    with world(sizes) as made:
        trainer = MegatronTrainer(
            WorldRanks(made, RankSettings(folder_of(root, case), adapter_of(case), sizes, TRAINING)), "base"
        )
        step(trainer, 0)
        found = made.call(holds)
    owners: dict[Values, list[int]] = defaultdict(list)
    for rank, (held, moments) in enumerate(found):
        assert moments.items() <= held.items()
        for values in moments:
            owners[values].append(rank)
    assert owners.keys() == {values for held, _ in found for values in held}
    assert {values: ranks for values, ranks in owners.items() if len(ranks) != 1} == {}
    # Ranks of a stage hold copies of nearly everything here. None has much more to update than its share.
    largest = max(size for held, _ in found for size in held.values())
    width = len(found) // sizes.pipeline
    for first in range(0, len(found), width):
        counts = [sum(moments.values()) for _, moments in found[first : first + width]]
        assert max(counts) <= sum(counts) / width + 2 * largest, counts


@pytest.mark.timeout(900)
def test_ranks_that_own_nothing_train_all_the_same(root: Path) -> None:
    """Two layers with one parameter each, on four ranks."""
    case, sizes = Case("qwen3", "BF16", "OFT", "None"), GroupSizes(4)
    folder, adapter = folder_of(root, case), replace(adapter_of(case), targets=("o_proj",))
    one = TorchTrainer(load_policy(folder, adapter), TRAINING)
    with world(sizes) as made:
        many = MegatronTrainer(WorldRanks(made, RankSettings(folder, adapter, sizes, TRAINING)), "base")
        for seed in range(2):
            assert step(many, seed) == pytest.approx(step(one, seed), rel=1e-5, abs=1e-5)
            moments = apart(hold_state(many)[PART], hold_state(one)[PART])
            assert moments["exp_avg"] <= 1e-5
            one.load_state(hold_state(many))
        counts = [len(moments) for _, moments in made.call(holds)]
    assert sorted(counts) == [0, 0, 1, 1]
