"""The critic: its loss, what it learns, what it leaves alone, and that it continues bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from orbit_runtime.adapters.buffer import publishable
from orbit_runtime.algorithms.losses import value_loss
from orbit_runtime.data.samples import spread, trained, with_column, with_end
from orbit_runtime.policy import load_policy
from orbit_runtime.training import TorchTrainer
from orbit_runtime.training.critic import explained_variance
from orbit_runtime.training.settings import CriticSettings
from orbit_runtime.types import Sample
from tests.fakes.held_state import hold_state
from tests.integration.test_torch_trainer import ADAPTERS, SETTINGS, changed, samples_of
from tests.integration.tiny_models import make_checkpoint

CRITIC = CriticSettings(peak_learning_rate=1e-2, value_clip=10.0, warmup_steps=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


def build(folder: Path, adapter: str = "LoRA", critic: CriticSettings | None = CRITIC) -> TorchTrainer:
    return TorchTrainer(load_policy(folder, ADAPTERS[adapter]), changed(SETTINGS, critic=critic, micro_batch_tokens=40))


def valued(trainer: TorchTrainer, samples: list[Sample]) -> list[Sample]:
    """Returns that a critic can know: 1 of every second answer, which its tokens tell apart."""
    samples = with_column(samples, "value", trainer.column("value", samples))
    return with_column(samples, "return", [spread(float(n % 2), s.loss_mask_T) for n, s in enumerate(samples)])


def test_the_value_loss_is_the_formula_written_out() -> None:
    generator = torch.Generator().manual_seed(3)
    values, old, returns, weights = torch.randn(4, 30, generator=generator, dtype=torch.float64)
    values = values.requires_grad_(True)
    expected = torch.zeros((), dtype=torch.float64)
    for t in range(30):
        low, high = old[t] - 0.2, old[t] + 0.2
        bounded = torch.min(torch.max(values[t], low), high)
        expected = expected + weights[t] * 0.5 * torch.max((values[t] - returns[t]) ** 2, (bounded - returns[t]) ** 2)
    (wanted,) = torch.autograd.grad(expected, values)
    loss = value_loss(values, old, returns, weights, clip=0.2)
    (found,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    assert 0 < int((wanted == 0).sum()) < 30, "some tokens are clipped, not all"


def test_a_value_loss_worked_by_hand() -> None:
    """Old 0 and 0, clip 0.2. Value 0.5 for a return of 1: (0.5 - 1)^2 = 0.25 and (0.2 - 1)^2 = 0.64, the larger
    one. Value 0.1 for 1: 0.81. Half their mean: (0.64 + 0.81) / 4; the first has no gradient, the second -0.9 / 2."""
    values = torch.tensor([0.5, 0.1], dtype=torch.float64, requires_grad=True)
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    loss = value_loss(values, torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64), half, clip=0.2)
    loss.backward()
    assert loss.item() == pytest.approx(0.3625)
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -0.45])


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
def test_it_learns_while_the_policy_is_updated_as_without_it(folder: Path, adapter: str) -> None:
    samples = samples_of(1)
    alone, trainer = build(folder, adapter, critic=None), build(folder, adapter)
    base = trainer._policy.base_digest()
    assert not any(any(column) for column in trainer.column("value", samples)), "it expects nothing at first"
    results = []
    for _ in range(12):
        results.append(trainer.update(valued(trainer, samples)).metrics)
        alone.update(samples)
    assert publishable(trainer, 1).digest == publishable(alone, 1).digest
    assert trainer._policy.base_digest() == base
    assert results[-1]["value_loss"] < results[0]["value_loss"] / 2
    assert results[0]["explained_variance"] == pytest.approx(0.0)
    assert results[-1]["explained_variance"] > 0.5
    assert "value_loss" not in alone.update(samples).metrics


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
def test_it_is_restored_bit_for_bit(folder: Path, adapter: str) -> None:
    straight = build(folder, adapter)
    for seed in range(3):
        straight.update(valued(straight, samples_of(seed)))
    first = build(folder, adapter)
    first.update(valued(first, samples_of(0)))
    second = build(folder, adapter)
    second.load_state(hold_state(first))
    for seed in (1, 2):
        second.update(valued(second, samples_of(seed)))
    assert set(hold_state(second)) == {"trainer.safetensors", "critic.safetensors"}
    assert hold_state(second) == hold_state(straight)


def test_in_its_warm_up_it_alone_learns(folder: Path) -> None:
    trainer = build(folder, critic=replace(CRITIC, warmup_steps=1))
    before = publishable(trainer, 0).digest
    metrics = trainer.update(valued(trainer, samples_of(1))).metrics
    assert publishable(trainer, 0).digest == before
    assert metrics["grad_norm"] > 0
    assert any(any(column) for column in trainer.column("value", samples_of(1)))
    held = hold_state(trainer)
    again = build(folder, critic=replace(CRITIC, warmup_steps=1))
    again.load_state(held)
    assert hold_state(again) == held
    again.update(valued(again, samples_of(1)))
    assert publishable(again, 0).digest != before


def test_its_rank_may_be_another(folder: Path) -> None:
    trainer = build(folder, critic=replace(CRITIC, rank=2))
    critic = trainer._updater.critic
    assert critic is not None
    assert {p.shape[0] for name, p in critic.parameters.items() if name.endswith("lora_A")} == {2}
    assert {p.shape[0] for name, p in trainer._masters.parameters.items() if name.endswith("lora_A")} == {4}


def test_what_comes_after_the_last_token_is_valued_whatever_token_stands_for_it(folder: Path) -> None:
    trainer = build(folder)
    samples = samples_of(4)
    trainer.update(valued(trainer, samples))
    plain, longer = trainer.column("value", samples), trainer.column("value", [with_end(each) for each in samples])
    for sample, column, more in zip(samples, plain, longer, strict=True):
        kept = list(trained(column, sample.loss_mask_T))
        assert list(more)[: len(column)] == pytest.approx(list(column), abs=1e-6)
        assert len(more) == len(column) + 1
        assert more[-1] != pytest.approx(kept[-1], abs=1e-9), "the state behind the last token is another"


def test_explained_variance_worked_by_hand() -> None:
    """Returns 1, 3; values 1, 1: their differences 0, 2 vary by 1, the returns by 1: nothing is explained. A masked
    token counts in neither."""
    columns = {"return": [9.0, 1.0, 3.0], "value": [5.0, 1.0, 1.0]}
    assert explained_variance([Sample([1, 2, 3], [0, 1, 1], columns, 0, 1)]) == {"explained_variance": 0.0}
    columns["value"] = [5.0, 0.5, 2.5]
    assert explained_variance([Sample([1, 2, 3], [0, 1, 1], columns, 0, 1)]) == {"explained_variance": 1.0}
    columns["return"] = [9.0, 1.0, 1.0]
    assert explained_variance([Sample([1, 2, 3], [0, 1, 1], columns, 0, 1)]) == {}
