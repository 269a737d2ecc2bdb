"""Each algorithm's loss against formulas written out naively, worked by hand, and cut into micro-batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orbit_runtime.algorithms.constants import Correction, PolicyLossSettings
from orbit_runtime.algorithms.losses import LossInputs, TokenLosses, policy_loss, token_weights
from orbit_runtime.algorithms.objective import build_loss
from orbit_runtime.algorithms.ratios import importance_weights, lesser, sample_sums, spread
from orbit_runtime.algorithms.table import loss_settings
from orbit_runtime.spec.algorithm import Algorithm
from orbit_runtime.spec.objectives import CORRECTIONS, OBJECTIVES
from tests.integration.objective_batches import LENGTHS, Batch, our_loss, random_batch

NAMED = sorted(set(OBJECTIVES) - {"Custom", "Distillation", "SFT"})


def algorithm(**fields: Any) -> Algorithm:
    return Algorithm.model_validate(fields)


def naive(batch: Batch, name: str) -> tuple[Tensor, Tensor]:
    """The papers' objectives, answer by answer and token by token, with their default constants."""
    given = batch.logprobs.clone().requires_grad_(True)
    answers = [
        (given[d][batch.kept[d]], batch.old[d][batch.kept[d]], float(batch.advantages[d]))
        for d in range(len(batch.mask))
    ]
    tokens, total = sum(LENGTHS), torch.zeros((), dtype=torch.float64)
    for new, old, advantage in answers:
        ratios = (new - old).exp()
        if name in ("GRPO", "OPO", "PPO", "ReinforcePlusPlus", "ReinforcePlusPlusBaseline", "DAPO", "DrGRPO"):
            high, share = (1.28 if name == "DAPO" else 1.2), (len(LENGTHS) * 7 if name == "DrGRPO" else tokens)
            for ratio in ratios:
                total = total - torch.min(ratio * advantage, ratio.clamp(0.8, high) * advantage) / share
        elif name == "GSPO":
            s = ((new - old).sum() / len(new)).exp()
            total = total - torch.min(s * advantage, s.clamp(1 - 3e-4, 1 + 4e-4) * advantage) / len(LENGTHS)
        elif name == "RLOO":
            r = (new.sum() - old.sum()).exp()
            total = total - torch.min(r * advantage, r.clamp(0.8, 1.2) * advantage) / len(LENGTHS)
        else:
            assert name == "CISPO"
            for ratio, logprob in zip(ratios, new, strict=True):
                total = total - min(float(ratio.detach()), 5.0) * advantage * logprob / tokens
    total.backward()
    assert given.grad is not None
    return total.detach(), given.grad


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", NAMED)
def test_each_algorithm_is_its_papers_formula(name: str, seed: int) -> None:
    batch = random_batch(seed, spread=5e-4 if name == "GSPO" else 0.15)
    loss, _, gradient = our_loss(batch, algorithm(type=name))
    expected, expected_gradient = naive(batch, name)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-9)
    assert expected_gradient.abs().max() > 1e-3


def test_gspos_gradient_is_that_of_verl() -> None:
    """verl 0.9 `compute_policy_loss_gspo` keeps a token's own log-prob for the gradient, and the answer's ratio for the
    value: log s_it = sg(log s_i) + log π_t - sg(log π_t). Advantages and weights are one per answer, so it is equal."""
    batch = random_batch(4, spread=5e-4)
    given = batch.logprobs.clone().requires_grad_(True)
    mask = batch.mask
    sequence = ((given - batch.old) * mask).sum(-1) / mask.sum(-1)
    ratio = torch.exp(given - given.detach() + sequence.detach().unsqueeze(-1))
    advantages = batch.advantages[:, None]
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - 3e-4, 1 + 4e-4))
    expected = ((losses * mask).sum(-1) / mask.sum(-1)).mean()
    expected.backward()
    loss, _, gradient = our_loss(batch, algorithm(type="GSPO"))
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(gradient, given.grad, rtol=0, atol=1e-9)


def flat_loss(
    name: str, changes: list[float], advantages: list[float], lengths: list[int]
) -> tuple[float, list[float]]:
    """Loss and gradient where each token's log-prob changed by so much."""
    chosen = algorithm(type=name)
    old = torch.linspace(-2.0, -1.0, len(changes), dtype=torch.float64)
    new = (old + torch.tensor(changes, dtype=torch.float64)).requires_grad_(True)
    per_sample = token_weights(lengths, chosen.objective.reduction, 4)
    weights = torch.tensor(per_sample, dtype=torch.float64).repeat_interleave(torch.tensor(lengths))
    inputs = LossInputs(new, old, torch.tensor(advantages, dtype=torch.float64), torch.tensor(lengths))
    loss, _ = build_loss(chosen)(inputs, weights, loss_settings(chosen))
    loss.backward()
    assert new.grad is not None
    return float(loss.detach()), new.grad.tolist()


@pytest.mark.parametrize(
    ("name", "loss", "gradient"),
    [
        # Ratios e^0.1 = 1.105171, e^0.3 = 1.349859 of an answer with A = 1, and e^-0.5 = 0.606531 of one with A = -1.
        # The second is clipped at 1.2, the third at 0.8: (-1.105171 - 1.2 + 0.8) / 3.
        ("GRPO", -0.501724, [-0.368390, 0, 0]),
        # The same over the constant 2 * 4.
        ("DrGRPO", -0.188146, [-0.138146, 0, 0]),
        # Clipped at 1.28 only: (-1.105171 - 1.28 + 0.8) / 3.
        ("DAPO", -0.528390, [-0.368390, 0, 0]),
        # The first answer's ratio is e^0.2 = 1.221403, clipped at 1.0004; the second's 0.606531, at 0.9997.
        ("GSPO", (-1.0004 + 0.9997) / 2, [0, 0, 0]),
        # Answers as one action: e^0.4 = 1.491825, clipped at 1.2; the second at 0.8.
        ("RLOO", (-1.2 + 0.8) / 2, [0, 0, 0]),
        # Log-probs -1.9, -1.2 and -1.5: (1.105171 * 1.9 + 1.349859 * 1.2 - 0.606531 * 1.5) / 3, gradients -w A / 3.
        ("CISPO", 0.936620, [-0.368390, -0.449953, 0.202177]),
    ],
)
def test_two_answers_worked_by_hand(name: str, loss: float, gradient: list[float]) -> None:
    found, slope = flat_loss(name, [0.1, 0.3, -0.5], [1.0, 1.0, -1.0], [2, 1])
    assert found == pytest.approx(loss, abs=1e-6)
    assert slope == pytest.approx(gradient, abs=1e-6)


def test_unclipped_answers_worked_by_hand() -> None:
    """GSPO: ratios e^((2e-4 + 0) / 2) = 1.0001 and 1. Loss -(1.0001 - 1) / 2; an answer's gradient is -s A / D, shared
    by its tokens. RLOO: ratio e^0.1 = 1.105171 of the first answer, its gradient whole at each token."""
    loss, gradient = flat_loss("GSPO", [2e-4, 0.0, 0.0], [1.0, 1.0, -1.0], [2, 1])
    assert loss == pytest.approx(-0.00005, abs=1e-8)
    assert gradient == pytest.approx([-1.0001 / 4, -1.0001 / 4, 0.5], abs=1e-7)
    loss, gradient = flat_loss("RLOO", [0.04, 0.06, 0.0], [1.0, 1.0, -1.0], [2, 1])
    assert loss == pytest.approx(-(1.105171 - 1) / 2, abs=1e-6)
    assert gradient == pytest.approx([-0.552585, -0.552585, 0.5], abs=1e-6)


@pytest.mark.parametrize("name", NAMED)
def test_on_policy_every_algorithm_has_the_policy_gradient(name: str) -> None:
    """Where the policy is the one that sampled, nothing is clipped: each token's gradient is -A times its weight, and
    for RLOO, whose action is the whole answer, -A times the answer's."""
    chosen = algorithm(type=name)
    _, gradient = flat_loss(name, [0.0, 0.0, 0.0], [1.0, 1.0, -1.0], [2, 1])
    per_sample = [1 / 2, 1 / 2] if name == "RLOO" else token_weights([2, 1], chosen.objective.reduction, 4)
    assert gradient == pytest.approx([-per_sample[0], -per_sample[0], per_sample[1]], abs=1e-12)


@pytest.mark.parametrize("low", [0.0, 0.2])
def test_a_bound_of_nothing_leaves_the_policy_gradient_whole(low: float) -> None:
    """On policy every ratio is at the bound of 1, and torch's `clamp` and `minimum` would halve each gradient."""
    chosen = algorithm(clip={"low": low, "high": low})
    inputs = LossInputs(
        torch.tensor([-1.0, -2.0], requires_grad=True),
        torch.tensor([-1.0, -2.0]),
        torch.tensor([3.0, -1.0]),
        torch.tensor([1, 1]),
    )
    loss, sums = build_loss(chosen)(inputs, torch.tensor([0.5, 0.5]), loss_settings(chosen))
    loss.backward()
    assert inputs.logprobs_T.grad is not None
    assert inputs.logprobs_T.grad.tolist() == [-1.5, 0.5]
    assert float(sums["clip_fraction"]) == 0


def test_the_lesser_of_ratio_and_clip_is_torchs_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(4000, generator=generator)
    advantages[::7] = 0.0
    for least in (None, 0.8):
        ratio = torch.exp(0.3 * torch.randn(4000, generator=generator)).requires_grad_(True)
        found, is_clipped = lesser(ratio, advantages, least, 1.2)
        naive = torch.min(ratio * advantages, ratio.clamp(least, 1.2) * advantages)
        assert torch.equal(found, naive)
        weights = torch.rand(4000, generator=generator)
        slopes = [torch.autograd.grad((each * weights).sum(), ratio)[0] for each in (found, naive)]
        assert torch.equal(*slopes)
        is_below = (ratio < least) & (advantages < 0) if least is not None else torch.zeros(4000, dtype=torch.bool)
        assert torch.equal(is_clipped.bool(), is_below | (ratio > 1.2) & (advantages > 0))


@pytest.mark.parametrize("name", ["GSPO", "RLOO"])
@pytest.mark.parametrize("one_each", [True, False])
def test_an_answers_ratio_meets_each_tokens_advantage(name: str, one_each: bool) -> None:
    """Whether the tokens of an answer share their advantage or not; a KL penalty in the reward makes them differ."""
    batch, chosen = random_batch(4, spread=0.001), algorithm(type=name)
    constants = loss_settings(chosen)
    noise = torch.zeros(()) if one_each else torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1))
    advantages = (batch.advantages[:, None] + noise) * batch.mask
    weights = batch.mask / batch.mask.sum()
    new = batch.logprobs.clone().requires_grad_(True)
    kept, lengths = batch.kept, batch.mask.sum(-1)
    inputs = LossInputs(new[kept], batch.old[kept], advantages[kept], lengths)
    found, sums = build_loss(chosen)(inputs, weights[kept], constants)
    total = ((new - batch.old) * batch.mask).sum(-1, keepdim=True)
    ratio = (total / lengths[:, None] if name == "GSPO" else total).exp()
    least, most = 1 - (constants.clip_low or 0), 1 + constants.clip_high
    naive = -(weights * torch.min(ratio * advantages, ratio.clamp(least, most) * advantages)).sum()
    torch.testing.assert_close(found, naive, rtol=0, atol=1e-12)
    slopes = [torch.autograd.grad(each, new)[0] for each in (found, naive)]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-12)
    is_clipped = (ratio > most) & (advantages > 0) | (ratio < least) & (advantages < 0)
    assert int(sums["clip_fraction"]) == int((is_clipped & kept).sum())


@pytest.mark.parametrize("name", NAMED)
def test_a_sample_without_trained_tokens_changes_nothing_wherever_it_is(name: str) -> None:
    batch, chosen = random_batch(2, spread=0.001), algorithm(type=name)
    kept, lengths = batch.kept, batch.mask.sum(-1).long()
    advantages = batch.advantages[:, None].expand(batch.mask.shape)[kept]
    none = torch.zeros(1, dtype=torch.long)

    def computed(lengths_D: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        new = batch.logprobs[kept].clone().requires_grad_(True)
        inputs = LossInputs(new, batch.old[kept], advantages, lengths_D)
        loss, sums = build_loss(chosen)(inputs, torch.full_like(new, 0.1), loss_settings(chosen))
        return loss.detach(), torch.autograd.grad(loss, new)[0], sums

    loss, slopes, sums = computed(lengths)
    assert bool(slopes.isfinite().all())
    for at in (0, 2, len(lengths)):
        again = computed(torch.cat([lengths[:at], none, lengths[at:]]))
        assert torch.equal(again[0], loss)
        assert torch.equal(again[1], slopes)
        assert {key: float(value) for key, value in again[2].items()} == {key: float(v) for key, v in sums.items()}


cuts = st.permutations(range(len(LENGTHS))).flatmap(
    lambda order: st.sets(st.integers(1, len(LENGTHS) - 1)).map(
        lambda at: [order[a:b] for a, b in zip([0, *sorted(at)], [*sorted(at), len(LENGTHS)], strict=True)]
    )
)


@given(
    cuts,
    st.sampled_from(NAMED),
    st.sampled_from(sorted(CORRECTIONS)),
    st.sampled_from(["Token", "Sequence", "Constant"]),
)
@settings(max_examples=150, deadline=None)
def test_micro_batches_change_no_loss_no_gradient_and_no_sum(
    parts: list[list[int]], name: str, correction: str, reduction: str
) -> None:
    batch = random_batch(3, spread=0.4)
    veto = {} if correction == "None" else {"veto": 0.6}
    chosen = algorithm(
        type=name,
        reduction=reduction,
        kl={"coefficient": 0.1, "placement": "Loss", "estimator": "K3", "importanceWeighted": True},
        importanceSampling={"type": correction, **veto},
    )
    whole, sums, gradient = our_loss(batch, chosen)
    pieces = [our_loss(batch, chosen, rows) for rows in parts]
    torch.testing.assert_close(sum(piece[0] for piece in pieces), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(sum(piece[2] for piece in pieces), gradient, rtol=0, atol=1e-12)
    for each, value in sums.items():
        torch.testing.assert_close(sum(float(piece[1][each]) for piece in pieces), float(value), rtol=0, atol=1e-6)


def test_a_sample_of_a_micro_batch_is_whole_and_each_has_its_own_ratio() -> None:
    lengths = torch.tensor([2, 1, 3])
    values = torch.tensor([1.0, 2.0, 5.0, 1.0, 1.0, 4.0], dtype=torch.float64, requires_grad=True)
    sums = sample_sums(values, lengths)
    assert sums.tolist() == [3.0, 5.0, 6.0]
    assert spread(sums, lengths).tolist() == [3.0, 3.0, 5.0, 6.0, 6.0, 6.0]
    assert torch.autograd.gradcheck(lambda given: spread(sample_sums(given, lengths), lengths).square(), values)


def test_importance_weights_worked_by_hand() -> None:
    """Two answers: ratios 1 and e^2 = 7.389056; and e^-0.5 = 0.606531."""
    trainer = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    sampler = torch.tensor([-1.0, -3.0, -0.5], dtype=torch.float64)

    def weights(kind: Any, cap: float, floor: float | None = None, veto: float | None = None) -> list[float]:
        correction = Correction(kind, cap, floor, veto)
        return importance_weights(trainer, sampler, torch.tensor([2, 1]), correction).tolist()

    e, h = math.exp(2.0), math.exp(-0.5)
    assert weights("TokenTruncated", 2.0) == pytest.approx([1.0, 2.0, h])
    assert weights("TokenMasked", 5.0, 0.5) == pytest.approx([1.0, 0.0, h])
    assert weights("TokenMasked", 8.0, 0.7) == pytest.approx([1.0, e, 0.0])
    assert weights("SequenceTruncated", 2.0) == pytest.approx([2.0, 2.0, h])
    assert weights("SequenceMasked", 2.0, 0.5) == pytest.approx([0.0, 0.0, h])
    assert weights("GeometricMasked", 3.0, 0.5) == [1.0, 1.0, 1.0], "e^1 = 2.72 is inside"
    assert weights("GeometricMasked", 2.0, 0.7) == [0.0, 0.0, 0.0]
    assert weights("TokenTruncated", 2.0, veto=0.7) == pytest.approx([1.0, 2.0, 0.0])
    assert weights("SequenceTruncated", 2.0, veto=1.5) == [0.0, 0.0, 0.0], "one token below is enough"


def test_geometric_rejection_is_verls() -> None:
    """verl 0.9 `rollout_rs: seq_mean_k1`: the mean of -log(ratio) inside [log lower, log upper], whose bounds are the
    inverse of ours: it keeps what has 1 / ratio in them."""
    batch = random_batch(12, spread=0.01)
    ratio = ((batch.old - batch.sampled) * batch.mask).sum(-1) / batch.mask.sum(-1)
    k1 = -ratio
    kept = (k1 >= math.log(0.995)) & (k1 <= math.log(1 / 0.995))
    assert 0 < int(kept.sum()) < len(kept)
    kept_T = kept[:, None].expand(batch.mask.shape)[batch.kept]
    correction = Correction("GeometricMasked", 1 / 0.995, 0.995)
    flat = (batch.old[batch.kept], batch.sampled[batch.kept], batch.mask.sum(-1))
    assert torch.equal(importance_weights(*flat, correction), kept_T.double())


def test_tokens_that_a_correction_drops_are_counted_and_leave_the_others_their_weight() -> None:
    batch = random_batch(11, spread=0.6)
    plain = our_loss(batch, algorithm(importanceSampling={"type": "TokenMasked", "floor": 1e-9, "cap": 1000}))
    dropped = our_loss(batch, algorithm(importanceSampling={"type": "TokenMasked", "floor": 0.8, "cap": 1.25}))
    gone = dropped[2] == 0
    assert dropped[1]["dropped_fraction"] > 0
    assert torch.equal(dropped[2][~gone], plain[2][~gone])


def test_an_own_loss_stands_where_a_shipped_one_does() -> None:
    """REINFORCE without any ratio; then the clipped surrogate written again, which must be GRPO."""
    batch = random_batch(2)
    own = algorithm(type="Custom", entrypoint="m:f")

    def reinforce(inputs: LossInputs, settings: PolicyLossSettings) -> TokenLosses:
        return TokenLosses(-inputs.advantages_T * inputs.logprobs_T)

    _, sums, gradient = our_loss(batch, own, own_loss=reinforce)
    expected = -(batch.advantages[:, None] * batch.mask) / batch.mask.sum()
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    assert "clip_fraction" not in sums

    def again(inputs: LossInputs, settings: PolicyLossSettings) -> TokenLosses:
        ratio = (inputs.logprobs_T - inputs.old_logprobs_T).exp()
        bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)  # type: ignore[operator]
        return TokenLosses(-torch.min(ratio * inputs.advantages_T, bounded * inputs.advantages_T))

    for found, usual in zip(our_loss(batch, own, own_loss=again), our_loss(batch, algorithm()), strict=True):
        if isinstance(found, Tensor):
            torch.testing.assert_close(found, usual, rtol=0, atol=1e-12)


def test_the_loss_of_tokens_is_weighted_and_summed() -> None:
    inputs = LossInputs(
        torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.0]), torch.tensor([3.0, 1.0]), torch.tensor([2])
    )
    loss, sums = policy_loss(inputs, torch.tensor([0.5, 0.25]), PolicyLossSettings())
    assert (loss.item(), sums["loss"].item(), sums["tokens"].item()) == (-1.75, -1.75, 2.0)
