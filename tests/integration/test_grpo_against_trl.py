"""GRPO's loss and gradient against TRL's own code on the same tensors, and against numbers worked by hand."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer

from orbit_runtime.algorithms.advantages import group_advantages
from orbit_runtime.algorithms.losses import PolicyLossSettings, kl_estimate, policy_loss, truncated_importance
from orbit_runtime.algorithms.reduction import token_weights

REDUCTIONS = {"Sequence": "grpo", "Token": "bnpo", "Constant": "dr_grpo"}
LONGEST = 7


class TrlLoss(GRPOTrainer):
    """TRL's trainer reduced to what its loss reads; its log-probs are the tensor we hand in."""

    def __init__(self, loss_type: str, beta: float, low: float, high: float, importance: bool) -> None:
        self.loss_type, self.beta, self.epsilon_low, self.epsilon_high = loss_type, beta, low, high
        self.importance_sampling_level = "token"
        self.top_entropy_quantile, self.off_policy_mask_threshold = 1.0, None
        self.max_completion_length, self.current_gradient_accumulation_steps = LONGEST, 1
        self.args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
        self.use_vllm = self.vllm_importance_sampling_correction = importance
        self.vllm_importance_sampling_mode = "token_truncate"
        self.aux_loss_enabled = self._entropy_bonus_enabled = self.use_adaptive_entropy = False
        self.model = SimpleNamespace(training=True)
        self.accelerator = SimpleNamespace(
            gather=lambda tensor: tensor, reduce=lambda tensor, reduction: tensor, num_processes=1
        )
        self._metrics = {"train": defaultdict(list)}
        self.given: torch.Tensor

    def _get_per_token_logps_and_entropies(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
        return self.given, torch.zeros_like(self.given), None  # type: ignore[return-value]


def batch(seed: int) -> tuple[torch.Tensor, ...]:
    """Six samples of unequal length: log-probs, old log-probs, reference, mask, advantages."""
    generator = torch.Generator().manual_seed(seed)
    shape = (6, LONGEST)
    logprobs = -torch.rand(shape, generator=generator) * 3
    old = logprobs + torch.randn(shape, generator=generator) * 0.3
    reference = logprobs + torch.randn(shape, generator=generator) * 0.2
    lengths = torch.tensor([7, 1, 4, 3, 7, 2])
    mask = (torch.arange(LONGEST)[None] < lengths[:, None]).long()
    advantages = torch.randn(6, generator=generator)
    return logprobs, old, reference, mask, advantages


@pytest.mark.parametrize("importance", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("reduction", sorted(REDUCTIONS))
def test_loss_and_gradient_equal_trl(reduction: str, beta: float, importance: bool) -> None:
    logprobs, old, reference, mask, advantages = batch(7)
    trl = TrlLoss(REDUCTIONS[reduction], beta, 0.2, 0.28, importance)
    trl.given = logprobs.clone().requires_grad_(True)
    ratio = torch.exp(torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(1))).clamp(max=2.0)
    empty = torch.zeros(6, 1, dtype=torch.long)
    expected = trl._compute_loss(
        trl.model,
        {
            "prompt_ids": empty,
            "prompt_mask": empty,
            "completion_ids": torch.zeros_like(mask),
            "completion_mask": mask,
            "advantages": advantages,
            "old_per_token_logps": old,
            "ref_per_token_logps": reference,
            "importance_sampling_ratio": ratio,
            "sampling_per_token_logps": old,
            "num_items_in_batch": mask.sum(),
        },
    )
    expected.backward()

    kept = mask.bool()
    ours = logprobs.clone().requires_grad_(True)
    lengths = mask.sum(-1).tolist()
    weights = torch.tensor(token_weights(lengths, reduction, LONGEST))[:, None].expand_as(mask)[kept]  # type: ignore[arg-type]
    settings = PolicyLossSettings(clip_low=0.2, clip_high=0.28, kl_coefficient=beta, kl_estimator="K3")
    loss, _ = policy_loss(
        ours[kept],
        old[kept],
        advantages[:, None].expand_as(old)[kept],
        weights,
        settings,
        reference_logprobs_T=reference[kept],
        importance_T=ratio[kept] if importance else None,
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(ours.grad, trl.given.grad, rtol=0, atol=1e-6)
    assert trl.given.grad.abs().max() > 1e-3


def test_a_group_of_two_worked_by_hand() -> None:
    """Rewards 1 and 0. mean 0.5, unbiased std sqrt(0.5) = 0.70711, so A = ±0.5 / 0.70721 = ±0.707007.

    Sample 1 has two tokens with ratios e^0.1 = 1.105171 and e^0.3 = 1.349859; A > 0 clips the second at 1.2.
    Its token losses: -0.707007 * 1.105171 = -0.781363 and -0.707007 * 1.2 = -0.848408.
    Sample 2 has one token with ratio e^-0.5 = 0.606531, below 0.8: A < 0 takes the clipped 0.8, loss 0.565605.
    Token mean:    (-0.781363 - 0.848408 + 0.565605) / 3 = -0.354722
    Sequence mean: ((-0.781363 - 0.848408) / 2 + 0.565605) / 2 = -0.124640
    Constant 4:    (-0.781363 - 0.848408 + 0.565605) / (2 * 4) = -0.133021
    Gradient reaches the first token only: -A * ratio * weight.
    """
    advantages = group_advantages([1.0, 0.0], normalize="Group")
    assert advantages == pytest.approx([0.707007, -0.707007], abs=1e-6)
    old = torch.tensor([-1.0, -2.0, -1.5])
    per_token = torch.tensor([advantages[0], advantages[0], advantages[1]])
    expected = {"Token": -0.354722, "Sequence": -0.124640, "Constant": -0.133021}
    for reduction, value in expected.items():
        per_sample = token_weights([2, 1], reduction, 4)  # type: ignore[arg-type]
        weights = torch.tensor([per_sample[0], per_sample[0], per_sample[1]])
        logprobs = (old + torch.tensor([0.1, 0.3, -0.5])).requires_grad_(True)
        loss, sums = policy_loss(logprobs, old, per_token, weights, PolicyLossSettings())
        loss.backward()
        assert loss.item() == pytest.approx(value, abs=1e-6)
        assert logprobs.grad.tolist() == pytest.approx([-0.781363 * per_sample[0], 0.0, 0.0], abs=1e-6)
        assert sums["clip_fraction"] == 2.0
        assert sums["tokens"] == 3.0


def test_advantages_leave_failures_out_and_equal_rewards_teach_nothing() -> None:
    assert group_advantages([1.0, 0.0, None], normalize="None") == [0.5, -0.5, 0.0]
    assert group_advantages([1.0, 1.0, 1.0], normalize="Group") == [0.0, 0.0, 0.0]
    assert group_advantages([3.0], normalize="Group") == [0.0]
    assert group_advantages([None, None], normalize="Group") == [0.0, 0.0]
    values = [0.3, 0.9, -0.2, 0.4]
    tensor = torch.tensor(values, dtype=torch.float64)
    expected = (tensor - tensor.mean()) / (tensor.std() + 1e-4)
    assert group_advantages(values, normalize="Group") == pytest.approx(expected.tolist(), abs=1e-12)


def test_kl_estimators_have_the_expectations_they_claim() -> None:
    """Over the whole distribution: E[k1] = E[k3] = KL exactly; k2 is half the expected squared log-ratio."""
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    kl = float((policy * (policy / reference).log()).sum())
    expectation = {
        name: float((policy * kl_estimate(policy.log(), reference.log(), name)).sum())  # type: ignore[arg-type]
        for name in ("K1", "K2", "K3")
    }
    assert expectation["K1"] == pytest.approx(kl, abs=1e-12)
    assert expectation["K3"] == pytest.approx(kl, abs=1e-12)
    squared = float((policy * (reference / policy).log().square()).sum()) / 2
    assert expectation["K2"] == pytest.approx(squared, abs=1e-12)


def test_importance_weights_are_cut_at_the_cap() -> None:
    trainer, sampler = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -3.0, -0.5])
    assert truncated_importance(trainer, sampler, 2.0).tolist() == pytest.approx([1.0, 2.0, math.exp(-0.5)])
