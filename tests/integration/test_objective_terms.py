"""What completes a surrogate, loss and gradient against formulas written out token by token: corrections, divergence
from the base, a teacher, and all of them together under each algorithm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from orbit_runtime.algorithms.constants import PolicyLossSettings
from orbit_runtime.algorithms.distillation import (
    divergence,
    kl_estimate,
    rest_of,
    sampled_divergence,
    split_off,
    spread_slopes,
)
from orbit_runtime.algorithms.losses import LossInputs, likelihood, policy_loss, token_weights
from orbit_runtime.algorithms.objective import build_loss
from orbit_runtime.algorithms.table import loss_settings
from orbit_runtime.spec.algorithm import Algorithm
from orbit_runtime.spec.objectives import CORRECTIONS
from tests.integration.objective_batches import LENGTHS, LONGEST, Batch, our_loss, random_batch
from tests.integration.test_objectives import NAMED, naive

EXACT = {"rtol": 0, "atol": 1e-9}


def algorithm(**fields: Any) -> Algorithm:
    return Algorithm.model_validate(fields)


# --- corrections of trainer against engine ---


def naive_weights(kind: str, ratios: Sequence[float], cap: float, floor: float, veto: float | None) -> list[float]:
    """The weights of one answer's tokens. FlashRL (truncated), IcePop, arXiv:2510.18855 (masked); of the product as in
    TRL 1.16; of the geometric mean and the veto, richardli.xyz/rl-collapse."""
    product = math.prod(ratios)
    level = {
        "Token": list(ratios),
        "Sequence": [product] * len(ratios),
        "Geometric": [product ** (1 / len(ratios))] * len(ratios),
    }[kind.removesuffix("Truncated").removesuffix("Masked")]
    if kind.endswith("Truncated"):
        weights = [min(each, cap) for each in level]
    else:
        weights = [(1.0 if "Geometric" in kind else each) if floor <= each <= cap else 0.0 for each in level]
    return [0.0] * len(ratios) if veto is not None and min(ratios) < veto else weights


@pytest.mark.parametrize("veto", [None, 0.7])
@pytest.mark.parametrize("kind", sorted(set(CORRECTIONS) - {"None"}))
def test_each_correction_with_and_without_veto_is_its_formula(kind: str, veto: float | None) -> None:
    batch = random_batch(11, spread=0.3)
    cap, floor = (1.1, 0.9) if kind == "GeometricMasked" else (1.3, 0.7)
    bounds = {"cap": cap} if kind.endswith("Truncated") else {"cap": cap, "floor": floor}
    given = batch.logprobs.clone().requires_grad_(True)
    expected, found_weights = torch.zeros((), dtype=torch.float64), []
    for d, length in enumerate(LENGTHS):
        ratios = (batch.old - batch.sampled)[d, :length].exp().tolist()
        found_weights.append(naive_weights(kind, ratios, cap, floor, veto))
        for t, weight in enumerate(found_weights[-1]):
            ratio, advantage = (given - batch.old)[d, t].exp(), batch.advantages[d]
            surrogate = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            expected = expected + weight * surrogate / sum(LENGTHS)
    expected.backward()
    asked = {"type": kind, **bounds, **({} if veto is None else {"veto": veto})}
    loss, sums, gradient = our_loss(batch, algorithm(importanceSampling=asked))
    torch.testing.assert_close(loss, expected.detach(), **EXACT)
    torch.testing.assert_close(gradient, given.grad, **EXACT)
    flat = [weight for each in found_weights for weight in each]
    assert sums["dropped_fraction"] == flat.count(0.0)
    assert any(flat), "something is left"
    assert veto is None or 0.0 in flat, "and something is dropped"
    assert len({round(weight, 6) for weight in flat}) > 1, "and it is not the same everywhere"


# --- divergence from the base, in the loss ---


def naive_kl(new: Tensor, old: Tensor, base: Tensor, estimator: str, weighted: bool) -> Tensor:
    """Schulman, joschu.net/blog/kl-approx.html; times the ratio: DeepSeek-V3.2, arXiv:2512.02556."""
    log_ratio = base - new
    term = {"K1": -log_ratio, "K2": log_ratio**2 / 2, "K3": log_ratio.exp() - 1 - log_ratio}[estimator]
    return (new - old).exp() * term if weighted else term


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("estimator", ["K1", "K2", "K3"])
def test_each_estimator_in_the_loss_is_its_formula(estimator: Any, weighted: bool) -> None:
    batch = random_batch(9)
    given = batch.logprobs.clone().requires_grad_(True)
    kl = [
        naive_kl(given[d, t], batch.old[d, t], batch.reference[d, t], estimator, weighted)
        for d, length in enumerate(LENGTHS)
        for t in range(length)
    ]
    term = 0.3 * torch.stack(kl).sum() / sum(LENGTHS)
    (slope,) = torch.autograd.grad(term, given)
    surrogate, surrogate_slope = naive(batch, "GRPO")
    settings = PolicyLossSettings(kl_coefficient=0.3, kl_estimator=estimator, kl_weighted=weighted)
    loss, gradient = completed(batch, "GRPO", settings)
    torch.testing.assert_close(loss, surrogate + term.detach(), **EXACT)
    torch.testing.assert_close(gradient, surrogate_slope + slope, **EXACT)
    assert slope.abs().max() > 1e-3


def test_estimators_worked_by_hand() -> None:
    """log-probs -1 under the policy and -1.5 under the base: d = -0.5. K1 0.5, K2 0.125, K3 e^-0.5 - 1 + 0.5 =
    0.106531; their slopes by the policy's: 1, -d = 0.5, 1 - e^-0.5 = 0.393469."""
    for estimator, value, slope in (("K1", 0.5, 1.0), ("K2", 0.125, 0.5), ("K3", 0.106531, 0.393469)):
        new = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
        term = kl_estimate(new, torch.tensor([-1.5], dtype=torch.float64), estimator)  # type: ignore[arg-type]
        term.sum().backward()
        assert new.grad is not None
        assert (term.item(), new.grad.item()) == pytest.approx((value, slope), abs=1e-6)


# --- a teacher ---


def completed(batch: Batch, name: str, settings: PolicyLossSettings, **further: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient of an algorithm with given terms. Args: further: fields of `LossInputs`, `[D, T]`."""
    chosen = algorithm(type=name)
    constants = loss_settings(chosen)
    settings = replace(settings, clip_low=constants.clip_low, clip_high=constants.clip_high)
    given = batch.logprobs.clone().requires_grad_(True)
    per_answer = token_weights(LENGTHS, chosen.objective.reduction, LONGEST)
    weights = torch.tensor(per_answer, dtype=torch.float64)[:, None].expand(batch.mask.shape)
    advantages = batch.advantages[:, None].expand(batch.mask.shape)
    kept = batch.kept
    if "distances_T" in further:
        further = {"distances_T": distances_of(given, further["distances_T"])}
    inputs = LossInputs(
        given[kept], batch.old[kept], advantages[kept], torch.tensor(LENGTHS),
        reference_logprobs_T=batch.reference[kept], **{key: value[kept] for key, value in further.items()},
    )  # fmt: skip
    loss, _ = build_loss(chosen)(inputs, weights[kept], settings)
    loss.backward()
    assert given.grad is not None
    return loss.detach(), given.grad


def distances_of(logprobs: Tensor, teacher: Tensor) -> Tensor:
    """Stands for what `policy.distance` computes: any function of the policy, with a gradient of its own."""
    return (logprobs - teacher).square()


@pytest.mark.parametrize("over", ["distances", "sampled reverse", "sampled forward"])
@pytest.mark.parametrize("name", [*NAMED, "Distillation"])
def test_a_teachers_term_joins_any_algorithm_with_that_algorithms_weights(name: str, over: str) -> None:
    """Thinking Machines, On-Policy Distillation (2025): the reverse KL of a sampled token is an advantage,
    log T - log S, under the ratio; the forward one is K3 (arXiv:2506.09477)."""
    batch = random_batch(5, spread=5e-4 if name == "GSPO" else 0.15)
    teacher = batch.reference
    given = batch.logprobs.clone().requires_grad_(True)
    reduction = algorithm(type=name).objective.reduction
    tokens, term = sum(LENGTHS), torch.zeros((), dtype=torch.float64)
    for d, length in enumerate(LENGTHS):
        share = {"Token": tokens, "Sequence": len(LENGTHS) * length, "Constant": len(LENGTHS) * LONGEST}[reduction]
        for t in range(length):
            new, taught = given[d, t], teacher[d, t]
            if over == "distances":
                each = (new - taught) ** 2
            elif over == "sampled reverse":
                each = -(new - batch.old[d, t]).exp() * float((taught - new).detach())
            else:
                each = (taught - new).exp() - 1 - (taught - new)
            term = term + 0.7 * each / share
    (slope,) = torch.autograd.grad(term, given)
    surrogate, surrogate_slope = (
        (torch.zeros((), dtype=torch.float64), torch.zeros_like(slope))
        if name == "Distillation"
        else naive(batch, name)
    )
    settings = PolicyLossSettings(teacher_coefficient=0.7, teacher_beta=float(over == "sampled reverse"))
    field = "distances_T" if over == "distances" else "teacher_logprobs_T"
    loss, gradient = completed(batch, name, settings, **{field: teacher})
    torch.testing.assert_close(loss, surrogate + term.detach(), **EXACT)
    torch.testing.assert_close(gradient, surrogate_slope + slope, **EXACT)
    assert slope.abs().max() > 1e-5


def test_sampled_tokens_of_a_teacher_worked_by_hand() -> None:
    """Log-probs -1 now, -1.2 as it was sampled, -0.5 under the teacher. Reverse: -e^0.2 * 0.5 = -0.610701, its slope
    the same. Forward: e^0.5 - 1 - 0.5 = 0.148721, its slope 1 - e^0.5 = -0.648721."""
    old, teacher = torch.tensor([-1.2], dtype=torch.float64), torch.tensor([-0.5], dtype=torch.float64)
    for beta, value, slope in ((1.0, -0.610701, -0.610701), (0.0, 0.148721, -0.648721)):
        new = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
        loss = sampled_divergence(new, old, teacher, beta)
        loss.sum().backward()
        assert new.grad is not None
        assert (loss.item(), new.grad.item()) == pytest.approx((value, slope), abs=1e-6)


# --- a teacher's likeliest tokens ---


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("top_k", [1, 5, 39])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergence_over_likeliest_tokens_has_the_gradient_of_the_formula(
    beta: float, top_k: int, is_told: bool
) -> None:
    """GKD, arXiv:2306.13649 eq. 1, over k cells and one for the rest, by autograd through the student's logits; also
    where only k log-probs of the teacher are known, as of a server."""
    generator = torch.Generator().manual_seed(8)
    student, teacher = torch.randn(2, 6, 40, generator=generator, dtype=torch.float64) * 2
    student.requires_grad_(True)
    T_all = teacher.log_softmax(-1)
    ids = T_all.topk(top_k).indices
    S, T = cells(student.log_softmax(-1).exp(), ids), cells(T_all.exp(), ids)
    if beta in (0.0, 1.0):
        P, Q = (S, T) if beta else (T, S)
        expected = (P * (P / Q).log()).sum(-1)
    else:
        M = (1 - beta) * S + beta * T
        expected = beta * (T * (T / M).log()).sum(-1) + (1 - beta) * (S * (S / M).log()).sum(-1)
    weights = torch.rand(6, generator=generator, dtype=torch.float64)
    (wanted,) = torch.autograd.grad((weights * expected).sum(), student)

    S_all = student.detach().log_softmax(-1)
    own, told = split_off(S_all, ids), T_all.gather(-1, ids)
    theirs = torch.cat([told, rest_of(told)], -1) if is_told else split_off(T_all, ids)
    values, slopes = divergence(own, theirs, beta)
    gradient = weights[:, None] * spread_slopes(slopes, S_all, ids, own[:, -1:])
    torch.testing.assert_close(values, expected.detach(), rtol=0, atol=1e-8)
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-8)
    assert wanted.abs().max() > 1e-3


def cells(probs: Tensor, ids: Tensor) -> Tensor:
    """The probabilities of these tokens, and of all others together."""
    outside = torch.ones_like(probs, dtype=torch.bool).scatter(-1, ids, False)
    return torch.cat([probs.gather(-1, ids), (probs * outside).sum(-1, keepdim=True)], -1)


def test_a_divergence_in_between_worked_by_hand() -> None:
    """S = (1/2, 1/2), T = (1/4, 3/4), beta 1/2: M = (3/8, 5/8). KL(T || M) = 1/4 ln(2/3) + 3/4 ln(6/5), KL(S || M) =
    1/2 ln(4/3) + 1/2 ln(4/5); the mean of both. Slopes: 1/2 S (ln S/M - KL(S || M))."""
    S, T = torch.tensor([[0.5, 0.5]]).double().log(), torch.tensor([[0.25, 0.75]]).double().log()
    value, slopes = divergence(S, T, 0.5)
    of_teacher = 0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5)
    of_student = 0.5 * math.log(4 / 3) + 0.5 * math.log(4 / 5)
    assert value.item() == pytest.approx((of_teacher + of_student) / 2)
    expected = [0.25 * (math.log(4 / 3) - of_student), 0.25 * (math.log(4 / 5) - of_student)]
    assert slopes[0].tolist() == pytest.approx(expected)


# --- demonstrations ---


def test_the_loss_of_demonstrations_is_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, 20, generator=generator, dtype=torch.float64).requires_grad_(True)
    targets = torch.randint(0, 20, (7,), generator=generator)
    expected = torch.nn.functional.cross_entropy(logits, targets)
    (wanted,) = torch.autograd.grad(expected, logits)
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    inputs = LossInputs(logprobs, logprobs.detach(), torch.zeros(7, dtype=torch.float64), torch.tensor([3, 4]))
    weights = torch.full((7,), 1 / 7, dtype=torch.float64)
    loss, _ = policy_loss(inputs, weights, PolicyLossSettings(), surrogate=likelihood)
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(loss, expected, **EXACT)
    torch.testing.assert_close(found, wanted, **EXACT)
