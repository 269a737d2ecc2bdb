"""The critic of a trainer that is divided among ranks against the one in a single process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orbit_runtime.adapters.buffer import publishable
from orbit_runtime.data.samples import spread, with_column
from orbit_runtime.errors import GateError
from orbit_runtime.policy import load_policy
from orbit_runtime.training import TorchTrainer
from orbit_runtime.training.megatron.groups import GroupSizes
from orbit_runtime.training.megatron.rank import RankSettings
from orbit_runtime.training.megatron.trainer import MegatronTrainer
from orbit_runtime.training.settings import CriticSettings, TrainerSettings
from orbit_runtime.training.state import CRITIC_PART, PART
from orbit_runtime.types import Sample
from tests.fakes.held_state import hold_state
from tests.integration.test_torch_trainer import changed, samples_of
from tests.megatron.cases import folder_of
from tests.megatron.ranks import Failed, World, world
from tests.megatron.test_trainer import TRAINING, apart, with_experts
from tests.megatron.trainers import WorldRanks, spoil
from tests.models.family_matrix import Case, adapter_of

LORA, OFT = Case("qwen3_moe", "INT4", "LoRA", "PerExpert"), Case("qwen3_moe", "BF16", "OFT", "SharedOuter")
DIVISIONS = {
    "TP2": (GroupSizes(2, tensor=2, expert=2), LORA),
    "TP2+SP": (GroupSizes(2, tensor=2, expert=2, sequence_parallel=True), OFT),
    "EP2": (GroupSizes(2, expert=2), LORA),
    "DP2": (GroupSizes(2), OFT),
    "PP2": (GroupSizes(2, pipeline=2), LORA),
    "CP2": (GroupSizes(2, context=2), OFT),
    "TP2+SP+PP2": (GroupSizes(4, tensor=2, expert=2, pipeline=2, sequence_parallel=True), LORA),
}
"""Each with one of two adapters, so that both meet what is divided by tokens, by layers and by experts."""
CRITIC = CriticSettings(peak_learning_rate=1e-2, value_clip=0.2, warmup_steps=0)


@pytest.fixture(scope="module", params=sorted(DIVISIONS))
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[World, Case]]:
    sizes, case = DIVISIONS[request.param]
    with world(sizes) as made:
        yield made, case


def both(ranks: World, root: Path, case: Case, settings: TrainerSettings) -> tuple[TorchTrainer, MegatronTrainer]:
    folder, adapter = folder_of(root, case), adapter_of(case)
    many = MegatronTrainer(WorldRanks(ranks, RankSettings(folder, adapter, ranks.sizes, settings)), "base")
    return TorchTrainer(load_policy(folder, adapter), settings), many


def valued(trainer: TorchTrainer, seed: int) -> list[Sample]:
    """Returns of 1 and 0 in turn."""
    samples = samples_of(seed)
    samples = with_column(samples, "value", trainer.column("value", samples))
    return with_column(samples, "return", [spread(float(n % 2), s.loss_mask_T) for n, s in enumerate(samples)])


def check_values(one: TorchTrainer, many: MegatronTrainer, samples: list[Sample]) -> None:
    for found, wanted in zip(many.column("value", samples), one.column("value", samples), strict=True):
        assert list(found) == pytest.approx(list(wanted), rel=1e-5, abs=5e-6)


@pytest.mark.timeout(900)
def test_ranks_value_and_learn_values_as_one_process_does(ranks: tuple[World, Case], root: Path) -> None:
    made, case = ranks
    rank = 2 if case.adapter == "LoRA" else None
    one, many = both(made, root, case, replace(TRAINING, critic=replace(CRITIC, rank=rank)))
    assert hold_state(many) == hold_state(one), "before the first update nothing was computed"
    # Two updates: the first one's gradient reaches the head alone, which was 0; the second one's all of the adapter.
    for seed in range(2):
        samples = valued(one, seed)
        check_values(one, many, samples)
        expected, found = (dict(each.update(samples).metrics) for each in (one, many))
        assert expected["value_loss"] > 0
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
        state = hold_state(many)
        assert set(state) == {PART, CRITIC_PART}
        for part in state:
            moments = apart(state[part], hold_state(one)[part])
            assert moments["exp_avg"] <= 1e-5, part
            assert moments["exp_avg_sq"] <= 2e-5, part
        # One state, wherever it goes: to one process and back, byte for byte.
        one.load_state(state)
        assert hold_state(one) == state
    check_values(one, many, samples_of(5))
    assert any(abs(value) > 0.01 for column in one.column("value", samples_of(5)) for value in column)
    assert publishable(many, 1).digest == publishable(one, 1).digest
    many.update(samples)
    many.load_state(state)
    assert hold_state(many) == state
    many.score(range(5, 17))
    name = made.call(spoil, made.sizes.world - 1, True, True)[-1]
    assert bool(name) == (made.sizes.pipeline != made.sizes.world), "stages alone hold no copies"
    if name:
        last = made.sizes.world - 1
        with pytest.raises(
            GateError, match=rf"ranks \d and {last} hold different values of the critic's {re.escape(name)}:"
        ):
            many.score(range(5, 17))


@pytest.mark.timeout(900)
def test_a_run_goes_on_with_the_critic_of_one_process_also_in_a_warm_up_and_with_given_experts(root: Path) -> None:
    """From the torch trainer to stages, several passes of which are under way, of replicas that divide experts."""
    settings = changed(
        TRAINING,
        critic=replace(CRITIC, warmup_steps=2),
        micro_batch_tokens=12,
        mini_batch_prompts=2,
        router_replay="Replay",
    )
    with world(GroupSizes(4, pipeline=2, expert=2)) as made:
        one, many = both(made, root, LORA, settings)
        one.update(with_experts(valued(one, 0)))
        state = hold_state(one)
        many.load_state(state)
        assert hold_state(many) == state
        before = publishable(many, 0).digest
        samples = with_experts(valued(one, 1))
        check_values(one, many, samples)
        expected, found = one.update(samples).metrics, many.update(samples).metrics
        assert found["value_loss"] == pytest.approx(expected["value_loss"], rel=1e-5)
        assert publishable(many, 0).digest == before, "the policy waits"
        assert apart(hold_state(many)[CRITIC_PART], hold_state(one)[CRITIC_PART])["exp_avg"] <= 1e-4
        many.update(samples)
        assert publishable(many, 0).digest != before


@pytest.mark.timeout(900)
def test_a_value_that_is_not_finite_ends_the_step_on_every_rank_alike(root: Path) -> None:
    with world(GroupSizes(2)) as made:
        one, many = both(made, root, OFT, replace(TRAINING, critic=CRITIC))
        samples, before = valued(one, 0), hold_state(many)[CRITIC_PART]
        # Only one replica's micro-batches have it.
        broken = with_column(samples[:1], "return", [spread(float("nan"), samples[0].loss_mask_T)])
        with pytest.raises(Failed, match="DivergedError: the critic's loss is nan"):
            many.update([*broken, *samples[1:]])
        assert hold_state(many)[CRITIC_PART] == before
