"""What each KL estimator's gradient is in expectation: the reason why the choice matters in the loss."""

from __future__ import annotations

import pytest
import torch

from orbit_runtime.algorithms.losses import PolicyLossSettings, kl_estimate, policy_loss


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


def test_a_good_token_becomes_likelier_and_a_bad_one_less() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss, _ = policy_loss(
        logprobs, logprobs.detach(), torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.5]), PolicyLossSettings()
    )
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, 0.5]


def test_sums_of_micro_batches_are_those_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(3)
    logprobs, old, reference, advantages = (torch.randn(12, generator=generator) for _ in range(4))
    weights = torch.rand(12, generator=generator) / 12
    settings = PolicyLossSettings(kl_coefficient=0.1)

    def sums(part: slice) -> dict[str, torch.Tensor]:
        arguments = (logprobs[part], old[part], advantages[part], weights[part], settings)
        return policy_loss(*arguments, reference_logprobs_T=reference[part])[1]

    whole, pieces = sums(slice(None)), [sums(slice(0, 5)), sums(slice(5, 6)), sums(slice(6, 12))]
    for name, value in whole.items():
        torch.testing.assert_close(sum(piece[name] for piece in pieces), value, rtol=1e-5, atol=1e-6)


def test_ratios_beyond_every_clip_stay_finite() -> None:
    logprobs = torch.tensor([0.0, -200.0], requires_grad=True)
    old = torch.tensor([-200.0, 0.0])
    loss, _ = policy_loss(
        logprobs,
        old,
        torch.tensor([0.0, 1.0]),
        torch.ones(2),
        PolicyLossSettings(kl_coefficient=0.1),
        reference_logprobs_T=old,
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
