"""Losses and gradients against TRL's own code on the same tensors in fp64, and against numbers worked by hand."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

from orbit_runtime.spec.algorithm import Algorithm
from tests.integration.objective_batches import LONGEST, Batch, our_loss, random_batch

REDUCTIONS = {"Sequence": "grpo", "Token": "bnpo", "Constant": "dr_grpo"}


class _Given:
    """What of TRL's trainers their losses read; log-probs are the tensor that is handed in."""

    given: Tensor

    def _get_per_token_logps_and_entropies(self, *args: object, **kwargs: object) -> tuple[Any, ...]:
        return self.given, torch.zeros_like(self.given), None

    def prepare(self, batch: Batch, low: float, high: float) -> None:
        self.epsilon_low, self.epsilon_high = low, high
        self.given = batch.logprobs.clone().requires_grad_(True)
        self.model = SimpleNamespace(training=True)
        self.accelerator = SimpleNamespace(
            gather=lambda tensor: tensor, reduce=lambda tensor, reduction: tensor, num_processes=1
        )
        self.aux_loss_enabled = self._entropy_bonus_enabled = self.use_adaptive_entropy = False
        self._metrics = {"train": defaultdict(list)}


class TrlGrpo(_Given, GRPOTrainer):  # type: ignore[misc]
    def __init__(self, batch: Batch, loss_type: str, low: float, high: float, **changes: object) -> None:
        self.prepare(batch, low, high)
        self.loss_type, self.beta = loss_type, changes.get("beta", 0.0)
        self.importance_sampling_level = changes.get("level", "token")
        self.top_entropy_quantile, self.off_policy_mask_threshold = 1.0, None
        self.max_completion_length, self.current_gradient_accumulation_steps = LONGEST, 1
        self.args = SimpleNamespace(
            delta=None, use_bias_correction_kl=changes.get("weighted", False), steps_per_generation=1
        )
        self.use_vllm = self.vllm_importance_sampling_correction = changes.get("importance", False)


class TrlRloo(_Given, RLOOTrainer):  # type: ignore[misc]
    def __init__(self, batch: Batch, low: float, high: float) -> None:
        self.prepare(batch, low, high)


def trl_loss(trainer: Any, batch: Batch, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Loss, and the gradient of the log-probs."""
    empty = torch.zeros(len(batch.mask), 1, dtype=torch.long)
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": empty,
            "prompt_mask": empty,
            "completion_ids": torch.zeros_like(batch.mask),
            "completion_mask": batch.mask,
            "advantages": batch.advantages,
            "old_per_token_logps": batch.old,
            "old_logps": (batch.old * batch.mask).sum(1),
            "ref_per_token_logps": batch.reference,
            "importance_sampling_ratio": weights,
            "sampling_per_token_logps": batch.sampled,
            "num_items_in_batch": batch.mask.sum(),
        },
    )
    loss.backward()
    return loss.detach(), trainer.given.grad


def check_equal(ours: tuple[Tensor, dict[str, Tensor], Tensor], expected: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(ours[0], expected[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(ours[2], expected[1], rtol=0, atol=1e-9)
    assert expected[1].abs().max() > 1e-3


def algorithm(**fields: Any) -> Algorithm:
    return Algorithm.model_validate(fields)


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("reduction", sorted(REDUCTIONS))
def test_grpo_and_dr_grpo(reduction: str, beta: float, truncated: bool) -> None:
    batch = random_batch(7)
    ratio = torch.exp(batch.old - batch.sampled).clamp(max=2.0) if truncated else None
    trl = TrlGrpo(batch, REDUCTIONS[reduction], 0.2, 0.28, beta=beta, importance=truncated)
    name = "DrGRPO" if reduction == "Constant" else "GRPO"
    settings = algorithm(
        type=name,
        reduction=reduction,
        clip={"high": 0.28},
        kl={"coefficient": beta},
        importanceSampling={"type": "TokenTruncated" if truncated else "None"},
    )
    check_equal(our_loss(batch, settings), trl_loss(trl, batch, ratio))


def test_dapo_over_the_tokens_of_the_batch() -> None:
    batch = random_batch(8)
    check_equal(our_loss(batch, algorithm(type="DAPO")), trl_loss(TrlGrpo(batch, "dapo", 0.2, 0.28), batch))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_gspo(seed: int) -> None:
    """Policies so close that the ratios of answers lie on both sides of clip ranges of 3e-4."""
    batch = random_batch(seed, spread=5e-4)
    ours = our_loss(batch, algorithm(type="GSPO"))
    check_equal(ours, trl_loss(TrlGrpo(batch, "grpo", 3e-4, 4e-4, level="sequence"), batch))


def test_some_answers_of_gspo_were_clipped_and_some_were_not() -> None:
    clipped = sum(
        float(our_loss(random_batch(s, spread=5e-4), algorithm(type="GSPO"))[1]["clip_fraction"]) for s in (1, 2, 3)
    )
    assert 0 < clipped < 3 * 24


@pytest.mark.parametrize("high", [0.1, 4.0])
def test_cispo(high: float) -> None:
    batch = random_batch(5, spread=2.0)
    ours = our_loss(batch, algorithm(type="CISPO", clip={"high": high}))
    check_equal(ours, trl_loss(TrlGrpo(batch, "cispo", 0.2, 1 + high), batch))
    assert ours[1]["clip_fraction"] > 0


def test_rloo() -> None:
    batch = random_batch(6, spread=0.1)
    ours = our_loss(batch, algorithm(type="RLOO"))
    check_equal(ours, trl_loss(TrlRloo(batch, 0.2, 0.2), batch))
    assert 0 < ours[1]["clip_fraction"] < 24


def test_a_weighted_kl_term() -> None:
    batch = random_batch(9)
    trl = TrlGrpo(batch, "bnpo", 0.2, 0.2, beta=0.3, weighted=True)
    settings = algorithm(kl={"coefficient": 0.3, "importanceWeighted": True})
    check_equal(our_loss(batch, settings), trl_loss(trl, batch))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("level", ["Token", "Sequence"])
def test_importance_sampling_of_each_kind(level: str, masked: bool) -> None:
    """The weights as `GRPOTrainer._generate_and_score_completions` computes them, in a loss that is TRL's."""
    batch = random_batch(11, spread=0.6)
    difference = (batch.old - batch.sampled) * batch.mask
    ratio = torch.exp(difference.sum(-1, keepdim=True) if level == "Sequence" else difference)
    if masked:
        weights = ratio.masked_fill((ratio < 0.5) | (ratio > 2.0), value=0.0)
        assert 0 < int((weights == 0).sum()) < weights.numel()
    else:
        weights = ratio.clamp(max=2.0)
        assert int((weights != ratio).sum()) > 0
    kind = f"{level}{'Masked' if masked else 'Truncated'}"
    bounds = {"cap": 2.0, "floor": 0.5} if masked else {"cap": 2.0}
    settings = algorithm(importanceSampling={"type": kind, **bounds})
    trl = TrlGrpo(batch, "bnpo", 0.2, 0.2, importance=True)
    check_equal(our_loss(batch, settings), trl_loss(trl, batch, weights))
