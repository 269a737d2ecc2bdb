"""The torch trainer: cuts that change nothing, state that resumes bit for bit, divergence that is caught."""

from __future__ import annotations

from array import array
from collections.abc import Buffer, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orbit_runtime.adapters.buffer import AdapterBuffer, publishable
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.algorithms.constants import Correction, PolicyLossSettings
from orbit_runtime.data.samples import spread, with_column
from orbit_runtime.errors import DivergedError, ModelError
from orbit_runtime.policy import load_policy
from orbit_runtime.spec.training import Schedule, Training
from orbit_runtime.training import TorchTrainer, TrainerSettings
from orbit_runtime.training.megatron.rank_parameters import RankParameters
from orbit_runtime.training.passes import LocalPasses
from orbit_runtime.training.settings import learning_rate
from orbit_runtime.training.state import PART, build_state, unpack_state
from orbit_runtime.types import Sample, Sampling
from tests.fakes.held_state import HeldState, hold_state
from tests.integration.tiny_models import TARGETS, load_reference, make_checkpoint, reference_logprobs

SETTINGS = TrainerSettings(
    Training(steps=10, learning_rate=1e-2, weight_decay=0.01, micro_batch_tokens=4096),
    decay_steps=10,
    loss=PolicyLossSettings(),
    reduction="Token",
    constant_length=16,
    correction=None,
    sampling=Sampling(),
    base_model="base",
)
ADAPTERS = {
    "LoRA": AdapterConfig(type="LoRA", targets=TARGETS, rank=4, alpha=8.0),
    "OFT": AdapterConfig(type="OFT", targets=TARGETS, block_size=16),
}
VARIANTS = {
    "LoRA with dropout": replace(ADAPTERS["LoRA"], dropout=0.2, rslora=True),
    "constrained OFT": replace(ADAPTERS["OFT"], coft=True, coft_eps=1e-3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


def changed(settings: TrainerSettings, **changes: Any) -> TrainerSettings:
    """The settings with these values; those of `training` are given by their own names."""
    training = {name: changes.pop(name) for name in Training.model_fields if name in changes}
    return replace(settings, training=settings.training.model_copy(update=training), **changes)


def build(folder: Path, adapter: str = "LoRA", **changes: Any) -> TorchTrainer:
    return TorchTrainer(load_policy(folder, (ADAPTERS | VARIANTS)[adapter]), changed(SETTINGS, **changes))


def samples_of(seed: int, groups: int = 3, size: int = 4) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for prefix_id in range(groups):
        prompt = torch.randint(2, 120, (3 + prefix_id,), generator=generator).tolist()
        for _ in range(size):
            count = int(torch.randint(1, 9, (), generator=generator))
            answer = torch.randint(2, 120, (count,), generator=generator).tolist()
            logprobs = (-4 - torch.rand(count, generator=generator)).tolist()
            advantage = float(torch.randn((), generator=generator))
            blank = [0.0] * len(prompt)
            columns = {"sampled": blank + logprobs, "advantage": blank + [advantage] * count}
            mask = [0] * len(prompt) + [1] * count
            made.append(Sample(prompt + answer, mask, columns, prefix_id, len(prompt)))
    return made


def with_advantage(samples: list[Sample], value: float) -> list[Sample]:
    return with_column(samples, "advantage", [spread(value, each.loss_mask_T) for each in samples])


def with_reference(samples: list[Sample], trainer: TorchTrainer) -> list[Sample]:
    return with_column(samples, "reference", trainer.column("reference", samples))


def num_parameters(trainer: TorchTrainer) -> int:
    return sum(master.numel() for master in trainer._masters.parameters.values())


def gradients(trainer: TorchTrainer, samples: list[Sample]) -> dict[str, torch.Tensor]:
    """The gradient that an update applies, read back from Adam's first moment after one step."""
    trainer.update(samples)
    return {
        name: trainer._updater.optimizer.state[parameter]["exp_avg"] * 10
        for name, parameter in trainer._policy.injected.masters.parameters.items()
    }


def test_entropies_of_the_answer_that_is_shown_are_those_of_transformers_before_the_update(folder: Path) -> None:
    samples = samples_of(9)
    samples[2] = shown = replace(samples[2], is_shown=True)
    trainer = build(folder, sampling=Sampling(temperature=0.7), micro_batch_tokens=25, update_epochs=2)
    found = trainer.update(samples).entropies_T
    with torch.no_grad():
        (logits,) = load_reference(folder)(torch.tensor([list(shown.token_ids_T)])).logits
    probabilities = (logits[shown.prefix_length - 1 : -1] / 0.7).softmax(-1)
    expected = -(probabilities * probabilities.log()).sum(-1)
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=2e-6)
    assert trainer.update(samples_of(9)).entropies_T == ()


def test_log_probs_of_the_base_are_those_of_transformers_whatever_the_adapter_is(folder: Path) -> None:
    trainer, samples = build(folder), samples_of(9)
    trainer.update(samples)
    assert trainer._policy.direct is not None
    model = load_reference(folder)
    for sample, column in zip(samples, trainer.column("base", samples), strict=True):
        expected = reference_logprobs(model, list(sample.token_ids_T))[sample.prefix_length - 1 :]
        found = torch.tensor(column[sample.prefix_length :])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
@pytest.mark.parametrize("reduction", ["Token", "Sequence", "Constant"])
def test_how_micro_batches_are_cut_does_not_change_the_gradient(folder: Path, adapter: str, reduction: str) -> None:
    samples = samples_of(1)
    whole = gradients(build(folder, adapter, reduction=reduction), samples)
    single = gradients(build(folder, adapter, reduction=reduction, micro_batch_tokens=1), samples)
    some = gradients(build(folder, adapter, reduction=reduction, micro_batch_tokens=25), samples)
    largest = max(float(value.abs().max()) for value in whole.values())
    for name, value in whole.items():
        torch.testing.assert_close(single[name], value, rtol=0, atol=1e-6 * max(1.0, largest))
        torch.testing.assert_close(some[name], value, rtol=0, atol=1e-6 * max(1.0, largest))


@given(
    seed=st.integers(0, 99),
    groups=st.integers(1, 4),
    size=st.integers(1, 4),
    budget=st.integers(1, 90),
    reduction=st.sampled_from(["Token", "Sequence", "Constant"]),
)
@settings(max_examples=8, deadline=None)
def test_however_any_batch_is_packed_its_loss_and_gradient_are_the_same(
    folder: Path, seed: int, groups: int, size: int, budget: int, reduction: str
) -> None:
    """The samples of a budget share one pass, and their prompt in it; against a pass for each sample."""
    samples = samples_of(seed, groups, size)
    packed, single = (
        build(folder, reduction=reduction, micro_batch_tokens=tokens, max_grad_norm=1e9) for tokens in (budget, 1)
    )
    losses = [trainer.update(samples).metrics["loss"] for trainer in (packed, single)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    masters = [trainer._policy.injected.masters.parameters for trainer in (packed, single)]
    for name, parameter in masters[0].items():
        found = packed._updater.optimizer.state[parameter]["exp_avg"]
        expected = single._updater.optimizer.state[masters[1][name]]["exp_avg"]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("adapter", sorted(ADAPTERS | VARIANTS))
def test_state_restored_into_a_new_trainer_continues_bit_for_bit(folder: Path, adapter: str) -> None:
    changes = {"mini_batch_prompts": 1, "update_epochs": 2, "schedule": Schedule(type="Cosine", warmup_steps=1)}
    straight = build(folder, adapter, **changes)
    for seed in range(4):
        straight.update(samples_of(seed))
    first = build(folder, adapter, **changes)
    first.update(samples_of(0))
    first.update(samples_of(1))
    second = build(folder, adapter, **changes)
    second.load_state(hold_state(first))
    results = [second.update(samples_of(seed)) for seed in (2, 3)]
    assert hold_state(second) == hold_state(straight)
    assert publishable(second, 4).digest == publishable(straight, 4).digest
    assert results[0].optimizer_updates == 6
    error = results[0].metrics.get("oft_series_error")
    if "OFT" in adapter:
        assert error is not None
        # Four blocks of the hidden state: no Q may be longer than 1e-3 / 2, and |R - C| is at most |Q|^4.
        assert (error <= (1e-3 / 2) ** 4) == (adapter == "constrained OFT")
    else:
        assert error is None


def test_a_fresh_trainer_saves_and_restores_before_its_first_update(folder: Path) -> None:
    first, second = build(folder), build(folder)
    second.load_state(hold_state(first))
    assert first.update(samples_of(0)) == second.update(samples_of(0))
    assert hold_state(first) == hold_state(second)


def test_state_of_another_adapter_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="master/"):
        build(folder, "LoRA").load_state(hold_state(build(folder, "OFT")))


@pytest.mark.parametrize("adapter", ["LoRA", "OFT"])
def test_state_is_read_beside_the_next_step_as_it_was_when_it_was_handed_over(folder: Path, adapter: str) -> None:
    """The latest moment at which it may be read is the first at which the trainer would change it."""
    trainer = build(folder, adapter)
    trainer.update(samples_of(0))

    class Late(HeldState):
        def write(self, name: str, size: int, pieces: Callable[[], Iterable[Buffer]]) -> None:
            self.name, self.pieces, self.waits = name, pieces, 0

        def wait(self) -> None:
            self.waits += 1
            self.parts[self.name] = b"".join(self.pieces())

    before, late = hold_state(trainer), Late()
    trainer.save_state(late)
    trainer.publish(AdapterBuffer())
    assert late.waits == 0, "nothing of the step is kept waiting but what changes the state"
    trainer.update(samples_of(1))
    assert late.waits == 1
    assert late.parts == before
    assert hold_state(trainer) != before
    other = Late()
    trainer.save_state(other)
    trainer.load_state(before)
    assert other.waits == 1


@pytest.mark.parametrize("fault", ["lost", "extra", "rounded", "reshaped", "not finite"])
def test_damaged_state_is_refused_by_tensor_and_changes_nothing(folder: Path, fault: str) -> None:
    trained, fresh = build(folder), build(folder)
    trained.update(samples_of(0))
    data = hold_state(trained)[PART]
    tensors = safetensors.torch.load(data)
    name = next(name for name in sorted(tensors) if name.startswith("exp_avg_sq/"))
    damaged = {
        "lost": {},
        "extra": {name: tensors[name], "exp_avg_sq/nowhere": tensors[name].clone()},
        "rounded": {name: tensors[name].bfloat16()},
        "reshaped": {name: tensors[name][:1]},
        "not finite": {name: tensors[name] * float("nan")},
    }[fault]
    rest = {key: tensor for key, tensor in tensors.items() if key != name}
    counters = {"counters": '{"steps": 1, "updates": 1}'}
    before = hold_state(fresh)
    with pytest.raises(ModelError, match=next(reversed(damaged), name).replace(".", r"\.")):
        fresh.load_state({PART: safetensors.torch.save(rest | damaged, metadata=counters)})
    assert hold_state(fresh) == before


def test_a_loss_that_is_not_finite_stops_before_the_masters_move(folder: Path) -> None:
    trainer = build(folder)
    before = hold_state(trainer)
    broken = with_advantage(samples_of(0), float("nan"))
    with pytest.raises(DivergedError) as caught:
        trainer.update(broken)
    assert caught.value.exit_code == 85
    assert "learningRate" in str(caught.value)
    assert hold_state(trainer) == before


def test_zero_advantages_leave_the_adapter_where_it_is(folder: Path) -> None:
    trainer = build(folder, weight_decay=0.0)
    before = publishable(trainer, 0).digest
    result = trainer.update(with_advantage(samples_of(0), 0.0))
    assert result.metrics["grad_norm"] == 0.0
    assert publishable(trainer, 1).digest == before


def test_the_norm_of_gradients_and_what_is_clipped_by_it_are_right_to_seven_digits() -> None:
    master = torch.nn.Parameter(torch.zeros(1 << 20))
    master.grad = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0))
    expected = float(master.grad.double().square().sum().sqrt())
    masters = SimpleNamespace(parameters={"lora_A": master}, after_update=None)
    policy: Any = SimpleNamespace(whole=masters, device=torch.device("cpu"), routing=None, pack=None)
    norm = LocalPasses(policy).finish_gradients()
    assert float(norm) == pytest.approx(expected, rel=1e-12)
    torch.nn.utils.clip_grads_with_norm_([master], 1.0, norm)
    assert float(master.grad.double().square().sum().sqrt()) == pytest.approx(1.0, rel=1e-7)


def test_a_step_without_samples_trains_nothing_and_counts(folder: Path) -> None:
    trainer = build(folder)
    before = publishable(trainer, 0).digest
    assert trainer.update([]).optimizer_updates == 0
    assert publishable(trainer, 0).digest == before


def test_parity_statistics_are_those_of_the_given_logprobs(folder: Path) -> None:
    trainer = build(folder)
    samples = samples_of(2)
    moved = [array("f", (value + 0.5 for value in column)) for column in trainer.column("reference", samples)]
    metrics = trainer.update(with_column(samples, "sampled", moved)).metrics
    # B starts at zero, so the adapted policy is the reference: every token differs by exactly the planted half.
    assert metrics["parity_mean"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["parity_max"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["parity_outside"] == 1.0
    assert metrics["parity_tokens"] > 0
    assert metrics["parity_k3"] == pytest.approx(0.10653066, abs=1e-5)


def test_kl_to_the_base_is_zero_at_first_and_pulls_back_later(folder: Path) -> None:
    loss = PolicyLossSettings(kl_coefficient=0.5)
    trainer = build(folder, loss=loss)
    assert trainer.update(with_reference(samples_of(0), trainer)).metrics["kl"] == pytest.approx(0.0, abs=1e-7)
    for seed in range(1, 6):
        trainer.update(with_reference(samples_of(seed), trainer))
    still = with_reference(with_advantage(samples_of(6), 0.0), trainer)
    drifted = trainer.update(still).metrics["kl"]
    assert drifted > 1e-3
    for _ in range(15):
        last = trainer.update(still).metrics["kl"]
    assert last < drifted / 2


def test_truncated_importance_weights_scale_the_gradient_by_the_cap(folder: Path) -> None:
    """Sampler log-probs far below the trainer's put every weight at its cap; the ratio to itself is then 1."""
    samples = samples_of(3)
    lowered = [array("f", (min(v, -60.0) if v else 0.0 for v in each.columns["sampled"])) for each in samples]
    samples = with_column(samples, "sampled", lowered)
    capped = gradients(build(folder, correction=Correction("TokenTruncated", 3.0), max_grad_norm=1e9), samples)
    single = gradients(build(folder, correction=Correction("TokenTruncated", 1.0), max_grad_norm=1e9), samples)
    for name, value in single.items():
        torch.testing.assert_close(capped[name], 3 * value, rtol=1e-4, atol=1e-7)


def test_the_schedule_warms_up_and_decays() -> None:
    def rates(schedule: str, steps: range) -> list[float]:
        return [
            learning_rate(step, Schedule(type=schedule, warmup_steps=2), peak=1.0, decay_steps=6)  # type: ignore[arg-type]
            for step in steps
        ]

    assert rates("Constant", range(4)) == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert rates("Linear", range(2, 8)) == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0])
    assert rates("Cosine", range(2, 8)) == pytest.approx([1, 0.853553, 0.5, 0.146447, 0, 0], abs=1e-6)


def test_restored_counters_of_the_optimizer_lie_on_the_device_of_their_masters() -> None:
    """Fused AdamW on a GPU refuses a counter on the CPU; "meta" stands for any device that is not the CPU."""

    def made(device: str) -> tuple[dict[str, torch.nn.Parameter], torch.optim.AdamW]:
        masters = {"layers.0.q_proj.lora_A": torch.nn.Parameter(torch.zeros(4, 8, device=device))}
        return masters, torch.optim.AdamW(masters.values())

    masters, optimizer = made("cpu")
    masters["layers.0.q_proj.lora_A"].grad = torch.ones(4, 8)
    optimizer.step()
    state = b"".join(map(bytes, build_state(masters, optimizer, {"updates": 1, "steps": 1}).pieces()))
    masters, optimizer = made("meta")
    unpack_state(state, masters, optimizer)
    assert {name: value.device.type for name, value in optimizer.state[masters["layers.0.q_proj.lora_A"]].items()} == {
        "step": "meta",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }
    holding = RankParameters({}, AdapterConfig("LoRA", ("q_proj",), rank=4, alpha=8.0), masters, masters, optimizer)
    optimizer.state[masters["layers.0.q_proj.lora_A"]]["step"] = torch.zeros(())
    holding.restored(3)
    assert optimizer.state[masters["layers.0.q_proj.lora_A"]]["step"].device.type == "meta"
