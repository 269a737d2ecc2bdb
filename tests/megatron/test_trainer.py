"""The trainer that is divided among ranks against the one in a single process: updates, files, proof and state."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from orbit_runtime.adapters.buffer import publishable
from orbit_runtime.adapters.files import expected_applied_digest
from orbit_runtime.algorithms.constants import Correction, PolicyLossSettings
from orbit_runtime.algorithms.custom_loss import LOSS, load_own
from orbit_runtime.algorithms.objective import build_loss
from orbit_runtime.algorithms.table import loss_settings
from orbit_runtime.data.routing import pack_experts
from orbit_runtime.data.samples import spread
from orbit_runtime.errors import GateError
from orbit_runtime.policy import load_policy
from orbit_runtime.policy.distance import Measure
from orbit_runtime.policy.recompute import Recompute
from orbit_runtime.spec.algorithm import Algorithm
from orbit_runtime.training import TorchTrainer
from orbit_runtime.training.megatron.groups import GroupSizes
from orbit_runtime.training.megatron.rank import RankSettings
from orbit_runtime.training.megatron.trainer import MegatronTrainer
from orbit_runtime.training.settings import TeacherSettings
from orbit_runtime.training.state import PART
from orbit_runtime.types import FLOATS, TOKENS, Sample
from tests.fakes.held_state import hold_state
from tests.integration.test_torch_trainer import (
    SETTINGS,
    changed,
    num_parameters,
    samples_of,
    with_advantage,
    with_reference,
)
from tests.megatron.cases import folder_of
from tests.megatron.ranks import Failed, World, world
from tests.megatron.trainers import WorldRanks, spoil
from tests.models.family_matrix import Case, adapter_of

DIVISIONS = {
    "1": GroupSizes(),
    "TP2+SP": GroupSizes(2, tensor=2, expert=2, sequence_parallel=True),
    "EP2": GroupSizes(2, expert=2),
    "DP2": GroupSizes(2),
    "PP2": GroupSizes(2, pipeline=2),
    "CP2": GroupSizes(2, context=2),
}
CASES = (Case("qwen3_moe", "INT4", "LoRA", "PerExpert"), Case("qwen3_moe", "BF16", "OFT", "SharedOuter"))
TRAINING = changed(
    SETTINGS,
    micro_batch_tokens=25,
    correction=Correction("TokenTruncated", 2.0),
    learning_rate=1e-3,
)
"""Three prompts in one update, of an odd number of micro-batches. Behind a second one of the same step nothing can be
compared to rounding: a master that rounding moved across a boundary of BF16 is published as another value."""
TRAINING_SFT = changed(TRAINING, correction=None, loss=loss_settings(Algorithm(type="SFT")), weight_decay=0.0)


@pytest.fixture(scope="module", params=sorted(DIVISIONS))
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    with world(DIVISIONS[request.param]) as made:
        yield made


def in_one(root: Path, case: Case) -> TorchTrainer:
    return TorchTrainer(load_policy(folder_of(root, case), adapter_of(case)), TRAINING)


def on_ranks(ranks: World, root: Path, case: Case) -> MegatronTrainer:
    settings = RankSettings(folder_of(root, case), adapter_of(case), ranks.sizes, TRAINING)
    return MegatronTrainer(WorldRanks(ranks, settings), TRAINING.base_model)


def apart(found: bytes, expected: bytes) -> dict[str, float]:
    """By kind of tensor, the largest difference; of moments relative to the largest of their parameter."""
    first, second = safetensors.torch.load(found), safetensors.torch.load(expected)
    assert first.keys() == second.keys()
    largest: dict[str, float] = {}
    for name, value in first.items():
        kind = name.partition("/")[0]
        size = 1.0 if kind == "master" else float(second[name].abs().max().clamp(min=1e-12))
        largest[kind] = max(largest.get(kind, 0.0), float((value - second[name]).abs().max()) / size)
    return largest


def step(trainer: TorchTrainer | MegatronTrainer, seed: int) -> dict[str, float]:
    samples: Sequence[Sample] = with_reference(samples_of(seed), trainer)  # type: ignore[arg-type]
    return dict(trainer.update(samples).metrics)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_train_publish_prove_and_resume_as_one_process_does(ranks: World, root: Path, case: Case) -> None:
    one, many = in_one(root, case), on_ranks(ranks, root, case)
    assert many.facts.report.trainable_parameters == num_parameters(one)
    assert hold_state(many) == hold_state(one), "before the first update nothing was computed"
    expected, found = step(one, 0), step(many, 0)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    # The first moment is the gradient; Adam divides it by its own size, so that what rounding left of a gradient
    # that is nearly 0 moves a master as far as any other.
    moments = apart(hold_state(many)[PART], hold_state(one)[PART])
    assert moments["exp_avg"] <= 1e-5
    assert moments["exp_avg_sq"] <= 2e-5

    # One state, wherever it goes: to one process and back, byte for byte.
    state = hold_state(many)
    one.load_state(state)
    assert hold_state(one) == state
    files = publishable(many, 1)
    assert files.digest == publishable(one, 1).digest
    tokens = (5, 9, 3, 77, 20, 31)
    (adapted, base), (wanted, wanted_base) = many.score(tokens), one.score(tokens)
    assert adapted.applied_digest == wanted.applied_digest == expected_applied_digest(files.files)
    assert adapted.logprobs_T == pytest.approx(wanted.logprobs_T, abs=5e-6)
    assert base.logprobs_T == pytest.approx(wanted_base.logprobs_T, abs=5e-6)

    # The next step from that state is the same on both sides.
    expected, found = step(one, 1), step(many, 1)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert apart(hold_state(many)[PART], hold_state(one)[PART])["exp_avg"] <= 1e-5
    many.load_state(state)
    assert hold_state(many) == state


@pytest.mark.timeout(900)
def test_ranks_learn_from_a_served_teachers_likeliest_tokens_as_one_process_does(ranks: World, root: Path) -> None:
    case, generator = CASES[0], np.random.default_rng(0)
    settings = replace(
        TRAINING,
        teacher=TeacherSettings("Served", Measure(1.0, 4)),
        loss=PolicyLossSettings(teacher_coefficient=0.5),
    )
    samples = []
    for sample in with_reference(samples_of(3), in_one(root, case)):
        rows = sum(sample.loss_mask_T)
        ids = np.stack([generator.choice(100, 4, replace=False) for _ in range(rows)]).astype(np.int32)
        logprobs = np.log(np.sort(generator.dirichlet([1.0] * 5, rows))[:, :0:-1]).astype(np.float32)
        top = (array(TOKENS, ids.tobytes()), array(FLOATS, logprobs.tobytes()))
        samples.append(replace(sample, teacher_top=top))
    one = TorchTrainer(load_policy(folder_of(root, case), adapter_of(case)), settings)
    many = MegatronTrainer(
        WorldRanks(ranks, RankSettings(folder_of(root, case), adapter_of(case), ranks.sizes, settings)), "base"
    )
    expected, found = one.update(samples).metrics, many.update(samples).metrics
    assert expected["teacher_divergence"] > 0.1
    assert found == pytest.approx(dict(expected), rel=1e-5, abs=1e-5)
    assert apart(hold_state(many)[PART], hold_state(one)[PART])["exp_avg"] <= 1e-5


@pytest.mark.timeout(900)
def test_ranks_make_several_updates_of_a_step_as_one_process_does(ranks: World, root: Path) -> None:
    case, settings = CASES[0], changed(TRAINING, mini_batch_prompts=2)
    one = TorchTrainer(load_policy(folder_of(root, case), adapter_of(case)), settings)
    many = MegatronTrainer(
        WorldRanks(ranks, RankSettings(folder_of(root, case), adapter_of(case), ranks.sizes, settings)), "base"
    )
    expected, found = step(one, 0), step(many, 0)
    assert one._updater.updates == 2
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.timeout(900)
def test_ranks_learn_demonstrations_as_one_process_does_and_go_on_bit_for_bit(ranks: World, root: Path) -> None:
    case, loss = CASES[0], build_loss(Algorithm(type="SFT"))
    one = TorchTrainer(load_policy(folder_of(root, case), adapter_of(case)), TRAINING_SFT, loss)
    settings = RankSettings(folder_of(root, case), adapter_of(case), ranks.sizes, TRAINING_SFT, loss=loss)
    many = MegatronTrainer(WorldRanks(ranks, settings), "base")
    held_out = [demonstrated(seed) for seed in (7, 8)]
    rows = []
    for seed in range(4):
        expected, found = (dict(each.update(demonstrated(seed)).metrics) for each in (one, many))
        # Adam turns what rounding left of a tiny gradient into a whole step, so that norms part sooner.
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        for samples in held_out:
            columns = zip(many.column("policy", samples), one.column("policy", samples), strict=True)
            assert all(list(a) == pytest.approx(list(b), rel=1e-4, abs=1e-5) for a, b in columns)
        rows.append(found)
        if seed == 1:
            state = hold_state(many)
    ended = hold_state(many)
    many.load_state(state)
    assert [dict(many.update(demonstrated(seed)).metrics) for seed in (2, 3)] == rows[2:]
    assert hold_state(many) == ended


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sizes", [DIVISIONS["DP2"], DIVISIONS["PP2"]], ids=["DP2", "PP2"])
def test_ranks_import_the_loss_that_a_manifest_names(sizes: GroupSizes, root: Path, tmp_path: Path) -> None:
    (tmp_path / "my_rank_loss.py").write_text(
        "def loss(inputs, settings):\n    return -inputs.logprobs_T * inputs.advantages_T * 3\n"
    )
    named = Algorithm(type="Custom", entrypoint="my_rank_loss:loss")
    case, own = CASES[0], load_own(named, LOSS, [str(tmp_path)])
    settings = replace(TRAINING, loss=loss_settings(named), correction=None)
    losses = {"own": build_loss(named, own_loss=own), "shipped": build_loss(Algorithm(type="SFT"))}
    one = {
        name: TorchTrainer(load_policy(folder_of(root, case), adapter_of(case)), settings, loss)
        for name, loss in losses.items()
    }
    with world(sizes) as made:
        given = RankSettings(folder_of(root, case), adapter_of(case), sizes, settings, loss=losses["own"])
        found = step(MegatronTrainer(WorldRanks(made, given), "base"), 0)
    expected = step(one["own"], 0)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert expected["loss"] != pytest.approx(step(one["shipped"], 0)["loss"], rel=0.1)


def demonstrated(seed: int) -> list[Sample]:
    """Nobody sampled them."""
    return [replace(each, columns={"advantage": spread(1.0, each.loss_mask_T)}) for each in samples_of(seed)]


@pytest.mark.timeout(900)
def test_ranks_leave_out_what_one_process_leaves_out(ranks: World, root: Path) -> None:
    """LoRA's dropout, whoever has the columns, tokens, samples or layers."""
    case = Case("qwen3", "BF16", "LoRA", "None")
    folder, adapter = folder_of(root, case), replace(adapter_of(case), dropout=0.25)
    one = TorchTrainer(load_policy(folder, adapter), TRAINING)
    many = MegatronTrainer(WorldRanks(ranks, RankSettings(folder, adapter, ranks.sizes, TRAINING)), "base")
    kept = in_one(root, case)
    expected, found = step(one, 0), step(many, 0)
    assert expected["grad_norm"] != pytest.approx(step(kept, 0)["grad_norm"], rel=1e-3), "nothing was left out"
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert apart(hold_state(many)[PART], hold_state(one)[PART])["exp_avg"] <= 1e-5


@pytest.mark.timeout(900)
@pytest.mark.parametrize("recompute", ["PerLayer", "Selective"])
def test_a_layer_runs_again_in_the_pass_it_belongs_to(recompute: Recompute, root: Path) -> None:
    """Stages have several passes under way, of different lengths, and replicas whose tokens meet in the experts."""
    case, sizes = CASES[0], GroupSizes(4, pipeline=2, expert=2)
    settings = changed(TRAINING, micro_batch_tokens=12)
    one = TorchTrainer(load_policy(folder_of(root, case), adapter_of(case)), settings)
    with world(sizes) as made:
        given = RankSettings(folder_of(root, case), adapter_of(case), sizes, settings, recompute=recompute)
        many = MegatronTrainer(WorldRanks(made, given), "base")
        expected, found = step(one, 0), step(many, 0)
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert apart(hold_state(many)[PART], hold_state(one)[PART])["exp_avg"] <= 1e-5


@pytest.mark.timeout(900)
def test_ranks_replay_the_experts_that_rollout_chose_as_one_process_does(ranks: World, root: Path) -> None:
    """Also where a rank's routers see the tokens of other replicas, and where nothing is known of some samples."""
    case = CASES[0]
    settings = replace(TRAINING, router_replay="Replay")
    one = TorchTrainer(load_policy(folder_of(root, case), adapter_of(case)), settings)
    many = MegatronTrainer(
        WorldRanks(ranks, RankSettings(folder_of(root, case), adapter_of(case), ranks.sizes, settings)), "base"
    )
    samples = with_experts(samples_of(0))
    expected, found = (dict(each.update(samples).metrics) for each in (one, many))
    assert expected["router_agreement"] < 0.9, "the given experts are not the routers' own"
    if ranks.sizes.data > 1:
        # Measured on the first micro-batch of every replica.
        for name in ("router_agreement", "parity_mean_replayed", "parity_mean_unreplayed"):
            assert found.pop(name) == pytest.approx(expected.pop(name), rel=0.25)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert apart(hold_state(many)[PART], hold_state(one)[PART])["exp_avg"] <= 1e-5


def with_experts(samples: Sequence[Sample]) -> list[Sample]:
    """Experts at random for all samples but the last."""
    draw = np.random.default_rng(3)
    given = []
    for sample in samples[:-1]:
        shape = (len(sample.token_ids_T) - 1, 2, 1)
        first = draw.integers(0, 8, shape)
        chosen = np.concatenate((first, (first + draw.integers(1, 8, shape)) % 8), -1)
        given.append(replace(sample, routed_experts=pack_experts(chosen.astype(np.int16))))
    return [*given, samples[-1]]


@pytest.mark.timeout(900)
def test_a_slice_that_is_stale_on_one_rank_shows_in_the_proof(ranks: World, root: Path) -> None:
    trainer = on_ranks(ranks, root, CASES[0])
    published = publishable(trainer, 0)
    assert trainer.score((5, 9, 3))[0].applied_digest == expected_applied_digest(published.files)
    if ranks.sizes in (DIVISIONS["DP2"], DIVISIONS["CP2"]):
        pytest.skip("ranks that divide samples or tokens hold copies, no slices: the next test")
    ranks.call(spoil, ranks.sizes.world - 1, False)
    assert trainer.score((5, 9, 3))[0].applied_digest != expected_applied_digest(published.files)


@pytest.mark.timeout(900)
def test_a_copy_that_is_stale_on_one_rank_is_named_with_its_tensor(ranks: World, root: Path) -> None:
    if ranks.sizes in (DIVISIONS["1"], DIVISIONS["PP2"]):
        pytest.skip("no rank holds a copy of another's part")
    trainer = on_ranks(ranks, root, CASES[0])
    name = ranks.call(spoil, ranks.sizes.world - 1, True)[-1]
    with pytest.raises(GateError, match=f"ranks 0 and 1 hold different values of {re.escape(name)}"):
        trainer.score((5, 9, 3))


@pytest.mark.timeout(900)
def test_a_loss_that_is_not_finite_ends_the_step_on_every_rank_alike(ranks: World, root: Path) -> None:
    trainer = on_ranks(ranks, root, CASES[0])
    before = hold_state(trainer)
    samples = samples_of(0)
    broken = [*with_advantage(samples[:1], float("nan")), *samples[1:]]
    with pytest.raises(Failed, match="DivergedError: the loss is nan"):
        trainer.update(broken)
    assert hold_state(trainer) == before
