"""On-policy distillation: the divergence and its gradient, its memory, its teachers, and what they are refused for."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from orbit_runtime.adapters.buffer import publishable
from orbit_runtime.adapters.foreign import load_foreign
from orbit_runtime.adapters.tensorfile import dump
from orbit_runtime.algorithms.constants import PolicyLossSettings
from orbit_runtime.algorithms.distillation import divergence, rest_of, sampled_divergence, split_off
from orbit_runtime.algorithms.losses import LossInputs, policy_loss
from orbit_runtime.algorithms.objective import build_loss
from orbit_runtime.algorithms.table import build_algorithm
from orbit_runtime.data.samples import with_column
from orbit_runtime.errors import ModelError
from orbit_runtime.policy import distance, load_policy
from orbit_runtime.policy.distance import Measure, TeacherReport, token_distances
from orbit_runtime.spec.algorithm import Algorithm
from orbit_runtime.training import TorchTrainer
from orbit_runtime.training.settings import TeacherSettings
from orbit_runtime.types import TEACHER_SLOT, AdapterFiles, Sample
from tests.fakes.held_state import hold_state
from tests.integration.test_torch_trainer import ADAPTERS, SETTINGS, changed, samples_of, with_advantage
from tests.integration.tiny_models import make_checkpoint

BETAS = [0.0, 0.3, 0.5, 1.0]
FULL = Measure(1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


def logits(seed: int, rows: int = 7, vocabulary: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, rows, vocabulary, generator=generator, dtype=torch.float64) * 2
    return student.requires_grad_(True), teacher


def trl(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    from trl.experimental.gkd import GKDTrainer  # its import warns that it may change

    return GKDTrainer.generalized_jsd_loss(student[None], teacher[None], beta=beta, reduction="sum")  # type: ignore[no-any-return]


# --- the divergence ---


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("beta", BETAS)
def test_divergence_and_gradient_are_trls(beta: float) -> None:
    """TRL 1.16 `generalized_jsd_loss`, GKD's eq. 1."""
    student, teacher = logits(1)
    expected = trl(student, teacher, beta)
    (gradient,) = torch.autograd.grad(expected, student)
    values, slopes = divergence(student.detach().log_softmax(-1), teacher.log_softmax(-1), beta)
    torch.testing.assert_close(values.sum(), expected.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(slopes, gradient, rtol=0, atol=1e-9)
    assert gradient.abs().max() > 1e-2


def test_divergences_worked_by_hand() -> None:
    """S = (1/2, 1/2), T = (1/4, 3/4). Forward: 1/4 ln(1/2) + 3/4 ln(3/2); reverse: 1/2 ln 2 + 1/2 ln(2/3). Slopes:
    forward S - T = (1/4, -1/4); reverse 1/2 (ln 2 - KL), 1/2 (ln(2/3) - KL)."""
    S, T = torch.tensor([[0.5, 0.5]]).double().log(), torch.tensor([[0.25, 0.75]]).double().log()
    forward, slopes = divergence(S, T, 0.0)
    assert forward.item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert slopes[0].tolist() == pytest.approx([0.25, -0.25])
    reverse, slopes = divergence(S, T, 1.0)
    kl = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert reverse.item() == pytest.approx(kl)
    assert slopes[0].tolist() == pytest.approx([0.5 * (math.log(2) - kl), 0.5 * (math.log(2 / 3) - kl)])


@pytest.mark.parametrize("top_k", [None, 5, 40, 64])
@pytest.mark.parametrize("beta", BETAS)
def test_chunks_give_the_gradient_of_the_whole_written_out(beta: float, top_k: int | None) -> None:
    generator = torch.Generator().manual_seed(2)
    head_VN = torch.randn(40, 6, generator=generator, dtype=torch.float32)
    hidden, taught = torch.randn(2, 9, 6, generator=generator)
    weights = torch.randn(9, generator=generator)
    hidden.requires_grad_(True)

    def head(states: Tensor) -> Tensor:
        return states @ head_VN.to(states.dtype).T

    found = token_distances(hidden, taught, head, Measure(beta, top_k), vocabulary=40, chunk_elements=2 * 40 * 2)
    (gradient,) = torch.autograd.grad((weights * found).sum(), hidden)

    wide = hidden.detach().double().requires_grad_(True)
    student, teacher = head(wide).log_softmax(-1), head(taught.double()).log_softmax(-1)
    if top_k is not None and top_k < 40:
        ids = teacher.topk(top_k).indices
        student, teacher = naive_cells(student, ids), naive_cells(teacher, ids)
    expected = naive_divergence(student, teacher, beta)
    (wanted,) = torch.autograd.grad((weights.double() * expected).sum(), wide)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=1e-4)


def naive_cells(logprobs: Tensor, ids: Tensor) -> Tensor:
    told = logprobs.gather(-1, ids)
    return torch.cat([told, (1 - told.exp().sum(-1, keepdim=True)).log()], dim=-1)


def naive_divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """GKD's eq. 1, token by token and cell by cell; its limits are the two KLs."""
    S, T = student.exp(), teacher.exp()
    if beta in (0.0, 1.0):
        P, Q = (S, T) if beta else (T, S)
        return (P * (P / Q).log()).sum(-1)
    M = (1 - beta) * S + beta * T
    return beta * (T * (T / M).log()).sum(-1) + (1 - beta) * (S * (S / M).log()).sum(-1)


@pytest.mark.parametrize("beta", BETAS)
def test_what_is_outside_of_the_likeliest_tokens_is_one_cell_of_its_own(beta: float) -> None:
    """TRL 1.16's `loss_add_tail`: the same cells. Merging cells never adds to a divergence."""
    from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket

    student, teacher = (each.detach().log_softmax(-1) for each in logits(3))
    whole, _ = divergence(student, teacher, beta)
    for k in (1, 4, 16, 39):
        ids = teacher.topk(k).indices
        theirs, _ = _add_tail_bucket(teacher.gather(-1, ids), torch.ones_like(ids, dtype=torch.bool))
        cells = split_off(teacher, ids)
        torch.testing.assert_close(cells, theirs, rtol=0, atol=1e-9)
        torch.testing.assert_close(torch.cat([cells[:, :-1], rest_of(cells[:, :-1])], -1), cells, rtol=0, atol=1e-9)
        torch.testing.assert_close(cells.exp().sum(-1), torch.ones(len(whole), dtype=torch.float64))
        value, _ = divergence(split_off(student, ids), cells, beta)
        assert bool((value <= whole + 1e-12).all())
    torch.testing.assert_close(value, whole, rtol=0, atol=1e-12)


def test_the_rest_keeps_the_mass_that_scaling_up_would_hide() -> None:
    """T = (0.6, 0.3, 0.1), S = (0.2, 0.1, 0.7): over the two likeliest, scaled up, both are (2/3, 1/3) and the
    divergence is 0. With the rest: 0.2 ln(1/3) + 0.1 ln(1/3) + 0.7 ln 7."""
    S, T = (torch.tensor([each]).double().log() for each in ([0.2, 0.1, 0.7], [0.6, 0.3, 0.1]))
    ids = T.topk(2).indices
    value, _ = divergence(split_off(S, ids), split_off(T, ids), 1.0)
    assert value.item() == pytest.approx(0.3 * math.log(1 / 3) + 0.7 * math.log(7))


def test_what_a_server_told_is_compared_as_the_teacher_itself_is() -> None:
    generator = torch.Generator().manual_seed(4)
    head_VN = torch.randn(40, 6, generator=generator)
    hidden, taught = torch.randn(2, 9, 6, generator=generator)

    def head(states: Tensor) -> Tensor:
        return states @ head_VN.T

    logprobs, ids = head(taught).log_softmax(-1).topk(4)
    results = []
    for teacher in (taught, TeacherReport(ids, logprobs)):
        given = hidden.clone().requires_grad_(True)
        values = token_distances(given, teacher, head, Measure(1.0, 4), vocabulary=40, chunk_elements=200)
        results.append((values.detach(), *torch.autograd.grad(values.sum(), given)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_memory_is_a_chunks_however_many_tokens_there_are() -> None:
    """Every tensor with a column per token of the vocabulary that is made in either pass, seen by the dispatcher; none
    of them is kept for backward: there are ten times as many tokens the second time, and no more rows."""
    from torch.utils._python_dispatch import TorchDispatchMode

    vocabulary, rows = 64, 4
    largest: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, tuple | list) else (out,):
                if isinstance(each, Tensor) and each.dim() == 2 and each.shape[-1] == vocabulary:
                    largest.append(each.shape[0])
            return out

    head_VN = torch.randn(vocabulary, 3)
    kept: list[int] = []
    for count in (16, 160):
        hidden = torch.randn(count, 3, requires_grad=True)
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.shape[-1]), t)[1], lambda t: t)
        with Watch():
            with hooks:
                found = token_distances(
                    hidden, torch.randn(count, 3), lambda states: states @ head_VN.T, FULL, vocabulary=vocabulary,
                    chunk_elements=distance.MODELS * rows * vocabulary,
                )  # fmt: skip
            found.sum().backward()
    assert 0 < max(largest) <= rows
    assert max(kept) <= 3, "hidden states are kept, and nothing of the vocabulary's size"


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_over_the_policys_samples_the_sampled_gradient_is_the_whole_ones(beta: float) -> None:
    """The expectation, by summing over every token instead of drawing: on policy exactly the divergence's gradient;
    reverse KL also where another policy drew them (its advantage is then that of the policy as it is now)."""
    student, teacher = logits(5, rows=1)
    all_S, all_T = student.log_softmax(-1)[0], teacher.log_softmax(-1)[0]
    (expected,) = torch.autograd.grad(naive_divergence(all_S, all_T, beta), student, retain_graph=True)
    loss = (all_S.detach().exp() * sampled_divergence(all_S, all_S.detach(), all_T, beta)).sum()
    (found,) = torch.autograd.grad(loss, student, retain_graph=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    if beta:
        old = (all_S.detach() + 0.3 * torch.randn(40, generator=torch.Generator().manual_seed(6))).log_softmax(-1)
        loss = (old.exp() * sampled_divergence(all_S, old, all_T, beta)).sum()
        (found,) = torch.autograd.grad(loss, student)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_it_is_added_to_any_loss_and_stands_alone() -> None:
    generator = torch.Generator().manual_seed(7)
    new, old, advantages, teacher, distances = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    inputs = LossInputs(new, old, advantages, torch.tensor([4, 2]), distances_T=distances)
    weights = torch.full((6,), 1 / 6, dtype=torch.float64)
    settings = PolicyLossSettings()
    plain, _ = policy_loss(inputs, weights, settings)
    both, sums = policy_loss(inputs, weights, replace(settings, teacher_coefficient=0.5))
    assert float(both) == pytest.approx(float(plain + 0.5 * distances.mean()))
    assert float(sums["teacher_divergence"]) == pytest.approx(float(distances.sum()))
    settings_alone = Algorithm.model_validate({"type": "Distillation", "teacher": {"over": "Sampled"}})
    alone = build_loss(settings_alone)
    assert build_algorithm(settings_alone).needs == {"teacher"}
    sampled = replace(inputs, distances_T=None, teacher_logprobs_T=teacher)
    loss, _ = alone(sampled, weights, replace(settings, teacher_coefficient=2.0))
    expected = (2.0 * (new - old).exp() * (new - teacher)).mean()
    assert float(loss) == pytest.approx(float(expected))


# --- teachers ---


def build(folder: Path, teacher: TeacherSettings | None, adapter: str = "LoRA", **changes: Any) -> TorchTrainer:
    loss = PolicyLossSettings(teacher_coefficient=1.0 if teacher else 0.0)
    settings = changed(SETTINGS, teacher=teacher, loss=loss, micro_batch_tokens=40, **changes)
    return TorchTrainer(load_policy(folder, ADAPTERS[adapter]), settings)


def trained_files(folder: Path, adapter: str = "LoRA") -> AdapterFiles:
    trainer = build(folder, None, adapter)
    for seed in range(3):
        trainer.update(samples_of(seed))
    return publishable(trainer, 3)


def taught_by(folder: Path, files: dict[str, Any], adapter: str = "LoRA", **changes: Any) -> TorchTrainer:
    policy = load_policy(folder, ADAPTERS[adapter])
    load_foreign(policy.injected.layers, TEACHER_SLOT, json.loads(bytes(files["adapter_config.json"])), files, "there")
    loss = PolicyLossSettings(teacher_coefficient=1.0)
    settings = changed(SETTINGS, teacher=TeacherSettings("Adapter", FULL), loss=loss, micro_batch_tokens=40, **changes)
    return TorchTrainer(policy, settings)


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
def test_an_adapter_teaches_as_the_trainer_that_made_it_scores(folder: Path, adapter: str) -> None:
    maker = build(folder, None, adapter)
    for seed in range(3):
        maker.update(samples_of(seed))
    student = taught_by(folder, dict(publishable(maker, 3).files), adapter)
    base = student._policy.base_digest()
    samples = samples_of(9)
    columns = student.column("teacher", samples)
    for sample, column in zip(samples, columns, strict=True):
        scored = np.asarray(maker.score(sample.token_ids_T)[0].logprobs_T)
        kept = np.flatnonzero(sample.loss_mask_T)
        assert np.asarray(column)[kept] == pytest.approx(scored[kept], abs=2e-5)
    assert student._policy.base_digest() == base


@pytest.mark.parametrize("over", [FULL, Measure(0.0, 8), Measure(0.5)])
def test_the_student_comes_nearer_to_its_teacher(folder: Path, over: Measure) -> None:
    student = taught_by(folder, dict(trained_files(folder).files))
    student._updater.teacher._settings = TeacherSettings("Adapter", over)  # type: ignore[union-attr]
    samples = with_advantage(samples_of(1), 0.0)
    results = [student.update(samples).metrics["teacher_divergence"] for _ in range(6)]
    assert results[-1] < results[0] / 2


def test_a_teachers_rank_and_targets_may_be_others(folder: Path) -> None:
    """Rank 2 on fewer layers, in fp32, as PEFT may have written it: other layers are the base's."""
    policy = load_policy(folder, replace(ADAPTERS["LoRA"], rank=2, targets=("q_proj", "down_proj")))
    maker = TorchTrainer(policy, SETTINGS)
    maker.update(samples_of(1))
    student = taught_by(folder, dict(publishable(maker, 1).files))
    sample = samples_of(2)[0]
    (column,) = student.column("teacher", [sample])
    scored = np.asarray(maker.score(sample.token_ids_T)[0].logprobs_T)
    kept = np.flatnonzero(sample.loss_mask_T)
    assert np.asarray(column)[kept] == pytest.approx(scored[kept], abs=2e-5)


def test_the_base_is_the_reference(folder: Path) -> None:
    trainer = build(folder, TeacherSettings("Base", None))
    trainer.update(with_teacher(trainer, samples_of(0)))
    assert trainer.column("teacher", samples_of(1)) == trainer.column("reference", samples_of(1))


def with_teacher(trainer: TorchTrainer, samples: list[Sample]) -> list[Sample]:
    return with_column(samples, "teacher", trainer.column("teacher", samples))


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
@pytest.mark.parametrize(
    "teacher",
    [TeacherSettings("Average", FULL, decay=0.9), TeacherSettings("Lagged", FULL, every_steps=2)],
    ids=["Average", "Lagged"],
)
def test_a_teacher_made_of_the_policy_is_restored_bit_for_bit(
    folder: Path, adapter: str, teacher: TeacherSettings
) -> None:
    straight = build(folder, teacher, adapter)
    divergences = [straight.update(samples_of(seed)).metrics["teacher_divergence"] for seed in range(5)]
    assert divergences[0] == pytest.approx(0.0, abs=1e-6)
    assert max(divergences) > 1e-5
    first = build(folder, teacher, adapter)
    for seed in range(3):
        first.update(samples_of(seed))
    second = build(folder, teacher, adapter)
    second.load_state(hold_state(first))
    for seed in (3, 4):
        second.update(samples_of(seed))
    assert set(hold_state(second)) == {"trainer.safetensors", "teacher.safetensors"}
    assert hold_state(second) == hold_state(straight)
    assert publishable(second, 5).digest == publishable(straight, 5).digest


def test_an_average_and_a_lag_worked_out(folder: Path) -> None:
    history: list[dict[str, Tensor]] = []
    average = build(folder, TeacherSettings("Average", None, decay=0.75))
    lagged = build(folder, TeacherSettings("Lagged", None, every_steps=2))
    for trainer in (average, lagged):
        history.clear()
        for seed in range(3):
            trainer.update(with_teacher(trainer, samples_of(seed)))
            history.append({name: each.detach().clone() for name, each in trainer._masters.parameters.items()})
        held = trainer._updater.teacher._masters.parameters  # type: ignore[union-attr]
        start = build(folder, None)._masters.parameters
        for name, value in held.items():
            if trainer is lagged:
                assert torch.equal(value, history[1][name])
                continue
            expected = start[name].detach().double()
            for step in history:
                expected = 0.75 * expected + 0.25 * step[name].double()
            torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-7)


def test_cutting_into_micro_batches_changes_no_gradient(folder: Path) -> None:
    files = dict(trained_files(folder).files)
    digests = []
    for tokens in (1, 4096):
        student = taught_by(folder, files)
        student._updater._settings = changed(student._settings, micro_batch_tokens=tokens)
        student.update(samples_of(1))
        digests.append({name: each.detach().clone() for name, each in student._masters.parameters.items()})
    for name, value in digests[0].items():
        torch.testing.assert_close(value, digests[1][name], rtol=0, atol=2e-5)


# --- what is refused ---


def test_a_teacher_of_another_base_is_named(folder: Path, tmp_path: Path) -> None:
    files = dict(trained_files(folder).files)
    policy = load_policy(folder, replace(ADAPTERS["LoRA"], targets=("q_proj",)))
    config = json.loads(bytes(files["adapter_config.json"]))
    with pytest.raises(ModelError, match=r"which this run's adapter does not.*cannot be used") as caught:
        load_foreign(policy.injected.layers, TEACHER_SLOT, config, files, "there")
    assert "spec.adapter.targets" in str(caught.value.fix)
    assert all(TEACHER_SLOT not in layer.slots for layer in policy.injected.layers.values())
    name = "model.layers.0.self_attn.q_proj"
    wrong = {
        f"base_model.model.{name}.{kind}.weight": torch.zeros(shape)
        for kind, shape in (("lora_A", (4, 3)), ("lora_B", (64, 4)))
    }
    with pytest.raises(ModelError, match=rf"{name}: the adapter has A \[4, 3\]") as caught:
        load_foreign(
            policy.injected.layers, TEACHER_SLOT, config,
            {**files, "adapter_model.safetensors": dump(wrong, torch.float32)}, "there",
        )  # fmt: skip
    assert "another base" in str(caught.value.fix)


def test_a_teacher_whose_values_are_not_finite_is_refused(folder: Path) -> None:
    policy = load_policy(folder, ADAPTERS["LoRA"])
    files = dict(trained_files(folder).files)
    from orbit_runtime.adapters.state import parse_tensors

    tensors = parse_tensors(files, "adapter_model.safetensors")
    first = next(iter(tensors))
    tensors[first] = torch.full_like(tensors[first], math.nan)
    files["adapter_model.safetensors"] = dump(tensors, torch.bfloat16)
    config = json.loads(bytes(files["adapter_config.json"]))
    with pytest.raises(ModelError, match="not finite"):
        load_foreign(policy.injected.layers, TEACHER_SLOT, config, files, "there")
