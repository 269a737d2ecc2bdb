"""What each KL estimator's gradient is in expectation: the reason why the choice matters in the loss."""

from __future__ import annotations

import pytest
import torch

from orbit_runtime.algorithms.advantages import kl_penalties
from orbit_runtime.algorithms.constants import PolicyLossSettings
from orbit_runtime.algorithms.distillation import kl_estimate, weighted_kl
from orbit_runtime.algorithms.losses import LossInputs, policy_loss


def expected_gradient(estimator: str) -> torch.Tensor:
    """E over the policy of the estimator's gradient with respect to the logits, summed exactly over the vocabulary."""
    logits, reference = policy_and_reference()
    logprobs = torch.log_softmax(logits, -1)
    terms = kl_estimate(logprobs, reference, estimator)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad((logprobs.exp().detach() * terms).sum(), logits)
    return gradient


def policy_and_reference() -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.tensor([0.3, -0.8, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.9, 0.1, -0.4, 0.2], dtype=torch.float64), -1)
    return logits, reference


def test_k1_has_no_gradient_in_expectation() -> None:
    assert expected_gradient("K1").abs().max() < 1e-12


@pytest.mark.parametrize(("estimator", "direction"), [("K2", "reverse"), ("K3", "forward")])
def test_k2_follows_the_reverse_kl_and_k3_the_forward_one(estimator: str, direction: str) -> None:
    logits, reference = policy_and_reference()
    logprobs = torch.log_softmax(logits, -1)
    reverse = (logprobs.exp() * (logprobs - reference)).sum()
    forward = (reference.exp() * (reference - logprobs)).sum()
    (expected,) = torch.autograd.grad(reverse if direction == "reverse" else forward, logits)
    torch.testing.assert_close(expected_gradient(estimator), expected, rtol=0, atol=1e-12)
    assert expected.abs().max() > 1e-2


@pytest.mark.parametrize("estimator", ["K1", "K3"])
def test_weighted_k1_and_k3_follow_the_reverse_kl_off_policy_too(estimator: str) -> None:
    logits, reference = policy_and_reference()
    old = torch.log_softmax(torch.tensor([0.1, 0.2, -0.9, 0.7], dtype=torch.float64), -1)
    logprobs = torch.log_softmax(logits, -1)
    terms = weighted_kl(logprobs, old, reference, estimator)  # type: ignore[arg-type]
    (found,) = torch.autograd.grad((old.exp() * terms).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    plain = kl_estimate(logprobs, reference, estimator)  # type: ignore[arg-type]
    (unweighted,) = torch.autograd.grad((old.exp() * plain).sum(), logits)
    assert (unweighted - expected).abs().max() > 1e-2, "without the weight it is another gradient"


def test_k1_in_the_reward_has_the_gradient_of_the_reverse_kl() -> None:
    """REINFORCE with the penalty for a reward: E[-(-K1) grad log p], whatever else the reward holds."""
    logits, reference = policy_and_reference()
    logprobs = torch.log_softmax(logits, -1)
    penalties = [
        kl_penalties([float(policy)], [float(base)], coefficient=1.0, estimator="K1")[0]
        for policy, base in zip(logprobs, reference, strict=True)
    ]
    advantages = -torch.tensor(penalties, dtype=torch.float64)
    (found,) = torch.autograd.grad(-(logprobs.exp().detach() * advantages * logprobs).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


def test_a_good_token_becomes_likelier_and_a_bad_one_less() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    inputs = LossInputs(logprobs, logprobs.detach(), torch.tensor([1.0, -1.0]), torch.tensor([2]))
    loss, _ = policy_loss(inputs, torch.tensor([0.5, 0.5]), PolicyLossSettings())
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, 0.5]


def test_ratios_beyond_every_clip_stay_finite() -> None:
    logprobs = torch.tensor([0.0, -200.0], requires_grad=True)
    old = torch.tensor([-200.0, 0.0])
    inputs = LossInputs(logprobs, old, torch.tensor([0.0, 1.0]), torch.tensor([1, 1]), reference_logprobs_T=old)
    loss, _ = policy_loss(inputs, torch.ones(2), PolicyLossSettings(kl_coefficient=0.1))
    loss.backward()
    assert torch.isfinite(loss)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
