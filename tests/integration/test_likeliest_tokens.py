"""A teacher whose likeliest tokens the samples hold: the loss against transformers' own models, and against a teacher
on the run's base with the same weights."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from orbit_runtime.algorithms.constants import PolicyLossSettings
from orbit_runtime.algorithms.distillation import divergence, rest_of, split_off, spread_slopes
from orbit_runtime.algorithms.objective import build_loss
from orbit_runtime.policy import load_policy
from orbit_runtime.policy.distance import Measure
from orbit_runtime.spec.algorithm import Algorithm
from orbit_runtime.training import TorchTrainer
from orbit_runtime.training.settings import TeacherSettings
from orbit_runtime.types import FLOATS, TEACHER_SLOT, TOKENS, Sample
from tests.integration.test_distillation import BETAS, naive_divergence, taught_by, trained_files
from tests.integration.test_torch_trainer import ADAPTERS, SETTINGS, changed, gradients, samples_of
from tests.integration.tiny_models import load_reference, make_checkpoint

K = 8
ALONE = build_loss(Algorithm.model_validate({"type": "Distillation", "teacher": {}}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("student"), "qwen3")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("teacher"), "qwen3", seed=1)


def logits_of(folder: Path, samples: list[Sample]) -> list[Tensor]:
    """transformers' logits in fp64 at the place of each token that trains: `[R, V]` of each sample."""
    model = load_reference(folder)
    found = []
    for sample in samples:
        with torch.no_grad():
            logits = model(torch.tensor([list(sample.token_ids_T)])).logits[0].double()
        found.append(logits[torch.tensor(sample.loss_mask_T).nonzero()[:, 0] - 1])
    return found


def with_top(samples: list[Sample], logprobs_D: list[Tensor]) -> list[Sample]:
    made = []
    for sample, logprobs_RV in zip(samples, logprobs_D, strict=True):
        values, ids = logprobs_RV.topk(K, dim=-1)
        top = (array(TOKENS, ids.flatten().tolist()), array(FLOATS, values.flatten().tolist()))
        made.append(replace(sample, teacher_top=top))
    return made


def naive(student_V: Tensor, teacher_V: Tensor, beta: float) -> Tensor:
    """GKD's eq. 1 of one token over the teacher's K likeliest tokens and all others together, cell by cell."""
    S, T = student_V.softmax(-1), teacher_V.softmax(-1)
    likeliest = sorted(range(len(T)), key=lambda token: -T[token])[:K]
    cells = [
        torch.stack([*(P[token] for token in likeliest), 1 - sum(P[token] for token in likeliest)]) for P in (S, T)
    ]
    return naive_divergence(*(each.log() for each in cells), beta)


def build(folder: Path, beta: float, **changes: object) -> TorchTrainer:
    settings = changed(
        SETTINGS,
        teacher=TeacherSettings("Served", Measure(beta, K)),
        loss=PolicyLossSettings(teacher_coefficient=1.0, teacher_beta=beta),
        micro_batch_tokens=25,
        **changes,  # type: ignore[arg-type]
    )
    return TorchTrainer(load_policy(folder, ADAPTERS["LoRA"]), settings, ALONE)


@pytest.mark.parametrize("beta", BETAS)
def test_the_arithmetic_is_the_naive_one_over_transformers_logits(folder: Path, other: Path, beta: float) -> None:
    """In fp64, value and gradient by the student's logits; the server's log-probs are fp32."""
    samples = samples_of(3, groups=2, size=2)
    students, teachers = (torch.cat(logits_of(each, samples)) for each in (folder, other))
    students.requires_grad_(True)
    expected = torch.stack([naive(*pair, beta) for pair in zip(students, teachers, strict=True)])
    (slope,) = torch.autograd.grad(expected.sum(), students)
    logprobs = students.detach().log_softmax(-1)
    told, ids = teachers.log_softmax(-1).topk(K)
    told = told.float().double()
    own = split_off(logprobs, ids)
    values, slopes = divergence(own, torch.cat([told, rest_of(told)], -1), beta)
    torch.testing.assert_close(values, expected.detach(), rtol=0, atol=1e-6)
    found = spread_slopes(slopes, logprobs.clone(), ids, own[:, -1:])
    torch.testing.assert_close(found, slope, rtol=0, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_a_steps_divergence_is_transformers_own(folder: Path, other: Path, beta: float) -> None:
    """The adapter changes nothing before its first update: the student is its base."""
    samples = samples_of(2)
    students, teachers = logits_of(folder, samples), logits_of(other, samples)
    expected = torch.stack([
        naive(*pair, beta) for pair in zip(torch.cat(students), torch.cat(teachers), strict=True)
    ])  # fmt: skip
    told = with_top(samples, [each.log_softmax(-1) for each in teachers])
    found = build(folder, beta).update(told).metrics["teacher_divergence"]
    assert found == pytest.approx(float(expected.mean()), rel=1e-6)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_it_teaches_as_a_teacher_of_the_same_weights_on_the_runs_base_does(folder: Path, beta: float) -> None:
    """The loss's only difference is the remainder, which a server does not tell: 1 minus the sum of fp32 numbers."""
    samples, measure = samples_of(4), Measure(beta, K)
    local = taught_by(folder, dict(trained_files(folder).files))
    teacher = local._updater.teacher
    assert teacher is not None
    teacher._settings = TeacherSettings("Adapter", measure)
    local._updater._loss = ALONE
    policy, logprobs = local._policy, []
    for sample in samples:
        (micro,) = local._updater._micro_batches([sample], [0])
        hidden = teacher.outputs(micro, None)
        assert isinstance(hidden, Tensor)
        logprobs.append(policy.head(hidden).float().log_softmax(-1).detach())
    assert TEACHER_SLOT in next(iter(policy.injected.layers.values())).slots
    served, told = build(folder, beta), with_top(samples, logprobs)
    one, two = gradients(local, samples), gradients(served, told)
    largest = max(float(each.abs().max()) for each in one.values())
    assert largest > 1e-3
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-6 * max(1.0, largest))
    ends = [trainer.update(each).metrics["teacher_divergence"] for trainer, each in ((local, samples), (served, told))]
    assert ends[1] == pytest.approx(ends[0], rel=1e-5)


def test_how_micro_batches_are_cut_changes_no_gradient_and_the_student_comes_nearer(folder: Path, other: Path) -> None:
    """With tokens in between that do not train: they have no likeliest tokens."""
    samples = samples_of(1)
    logprobs = [each.log_softmax(-1) for each in logits_of(other, samples)]
    gapped = []
    for sample, told in zip(samples, logprobs, strict=True):
        mask = array(sample.loss_mask_T.typecode, sample.loss_mask_T)
        kept = np.ones(len(told), bool)
        if len(told) > 2:
            kept[1] = False
            mask[len(mask) - len(told) + 1] = 0
        gapped += with_top([replace(sample, loss_mask_T=mask)], [told[torch.from_numpy(kept)]])
    whole, single = build(folder, 1.0), build(folder, 1.0)
    single._updater._settings = changed(single._settings, micro_batch_tokens=1)
    one, two = gradients(whole, gapped), gradients(single, gapped)
    largest = max(float(each.abs().max()) for each in one.values())
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=2e-6 * max(1.0, largest))
    results = [whole.update(gapped).metrics["teacher_divergence"] for _ in range(6)]
    assert results[-1] < 0.7 * results[0]
