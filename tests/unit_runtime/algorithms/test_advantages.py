"""Advantages against other libraries' formulas, written out naively, and against numbers worked by hand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit_runtime.algorithms.advantages import (
    GAE,
    Advantage,
    ScoredGroup,
    compared,
    estimate_advantages,
    is_informative,
    overlong_penalty,
)
from orbit_runtime.errors import DivergedError
from orbit_runtime.spec.algorithm import Algorithm
from orbit_runtime.spec.objectives import OBJECTIVES

REWARDS = [[1.0, 0.0, 0.0, 0.5], [0.2, 0.9, -0.4, 0.9]]
LENGTHS = [[3, 1, 4, 2], [5, 2, 2, 6]]
GROUPS = [ScoredGroup(rewards, lengths) for rewards, lengths in zip(REWARDS, LENGTHS, strict=True)]


def estimated(groups: Sequence[ScoredGroup], name: str) -> list[list[Advantage]]:
    """As the named algorithm has it; a critic expects nothing, and looks at the whole answer."""
    row = Algorithm.model_validate({"type": name}).objective
    assert row.baseline is not None
    assert row.normalize is not None
    if row.baseline == "Critic":
        groups = [replace(each, values_GT=[[0.0] * length for length in each.lengths_G]) for each in groups]
    return estimate_advantages(groups, baseline=row.baseline, normalize=row.normalize, gae=GAE(1.0, 1.0))


def whitened(values: Sequence[float], counts: Sequence[int]) -> list[float]:
    """verl 0.9's `masked_whiten` over a matrix of tokens, each value standing `count` times in it."""
    tokens = [value for value, count in zip(values, counts, strict=True) for _ in range(count)]
    mean = sum(tokens) / len(tokens)
    masked_var = sum((token - mean) ** 2 for token in tokens) / len(tokens) * len(tokens) / (len(tokens) - 1)
    return [(value - mean) / math.sqrt(masked_var + 1e-8) for value in values]


def flat(nested: Sequence[Sequence[Any]]) -> list[Any]:
    return [each for group in nested for each in group]


@pytest.mark.parametrize("name", ["GRPO", "DAPO", "GSPO", "CISPO", "Custom"])
def test_a_reward_counts_against_its_group_in_deviations(name: str) -> None:
    """TRL 1.16: `(rewards - mean_grouped) / (std_grouped + 1e-4)`, `torch.std` being unbiased."""
    for found, rewards in zip(estimated(GROUPS, name), REWARDS, strict=True):
        mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
        assert found == pytest.approx([(r - mean) / (deviation + 1e-4) for r in rewards], abs=1e-12)


def test_dr_grpo_divides_by_nothing() -> None:
    for found, rewards in zip(estimated(GROUPS, "DrGRPO"), REWARDS, strict=True):
        assert found == pytest.approx([r - statistics.mean(rewards) for r in rewards], abs=1e-12)


def test_rloo_leaves_a_rollout_out_of_its_own_baseline() -> None:
    """verl 0.9 `compute_rloo_outcome_advantage`: r n/(n-1) - mean n/(n-1); TRL 1.16: r - (sum - r) / (n - 1)."""
    for found, rewards in zip(estimated(GROUPS, "RLOO"), REWARDS, strict=True):
        n, mean = len(rewards), statistics.mean(rewards)
        assert found == pytest.approx([r * n / (n - 1) - mean * n / (n - 1) for r in rewards], abs=1e-12)
        assert found == pytest.approx([r - (sum(rewards) - r) / (n - 1) for r in rewards], abs=1e-12)
    # By hand: 1 against the mean of 0, 0 and 0.5.
    assert estimated(GROUPS, "RLOO")[0][0] == pytest.approx(1 - 1 / 6, abs=1e-12)


def test_opo_weighs_the_baseline_by_length() -> None:
    """verl 0.9 `compute_opo_outcome_advantage`: (len * score).sum() / len.sum()."""
    for found, rewards, lengths in zip(estimated(GROUPS, "OPO"), REWARDS, LENGTHS, strict=True):
        baseline = sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)
        assert found == pytest.approx([r - baseline for r in rewards], abs=1e-12)
    # By hand: (3 * 1 + 1 * 0 + 4 * 0 + 2 * 0.5) / 10 = 0.4.
    assert estimated(GROUPS, "OPO")[0] == pytest.approx([0.6, -0.4, -0.4, 0.1], abs=1e-12)


def test_reinforce_plus_plus_normalises_returns_over_the_tokens_of_the_step() -> None:
    """verl 0.9 `compute_reinforce_plus_plus_outcome_advantage` with gamma 1."""
    assert flat(estimated(GROUPS, "ReinforcePlusPlus")) == pytest.approx(
        whitened(flat(REWARDS), flat(LENGTHS)), abs=1e-12
    )


def test_reinforce_plus_plus_counts_what_a_token_and_those_after_it_pay() -> None:
    """verl 0.9 adds up `token_level_rewards` from the last token back: -penalty at each, the reward at the last."""
    penalties = [[[0.1] * n for n in lengths] for lengths in LENGTHS]
    groups = [ScoredGroup(r, n, p) for r, n, p in zip(REWARDS, LENGTHS, penalties, strict=True)]
    returns = []
    for reward, length in zip(flat(REWARDS), flat(LENGTHS), strict=True):
        token_level_rewards = [-0.1] * (length - 1) + [reward - 0.1]
        returns.append([sum(token_level_rewards[t:]) for t in range(length)])
    tokens = flat(returns)
    assert flat(flat(estimated(groups, "ReinforcePlusPlus"))) == pytest.approx(
        whitened(tokens, [1] * len(tokens)), abs=1e-9
    )


def test_reinforce_plus_plus_with_baseline_takes_the_mean_of_the_group_off_first() -> None:
    """verl 0.9 `compute_reinforce_plus_plus_baseline_outcome_advantage`."""
    scores = [r - statistics.mean(rewards) for rewards in REWARDS for r in rewards]
    found = flat(estimated(GROUPS, "ReinforcePlusPlusBaseline"))
    assert found == pytest.approx(whitened(scores, flat(LENGTHS)), abs=1e-12)


def test_two_tokens_whitened_by_hand() -> None:
    """Rewards 1 and 0, a token each: mean 0.5, unbiased variance 0.5, so ±0.5 / sqrt(0.5) = ±0.707107."""
    groups = [ScoredGroup([1.0], [1]), ScoredGroup([0.0], [1])]
    assert flat(estimated(groups, "ReinforcePlusPlus")) == pytest.approx([0.707107, -0.707107], abs=1e-6)


def test_two_answers_to_a_prompt_worked_by_hand() -> None:
    """Rewards 1 and 0: mean 0.5, unbiased deviation sqrt(0.5) = 0.707107, so ±0.5 / 0.707207. Beside a prompt whose
    answers both earn 1, four tokens: ±0.5, 0 and 0, whose unbiased variance is 0.5 / 3, so ±0.5 / 0.408248."""
    group, other = ScoredGroup([1.0, 0.0], [1, 1]), ScoredGroup([1.0, 1.0], [1, 1])
    assert estimated([group], "GRPO")[0] == pytest.approx([0.707007, -0.707007], abs=1e-6)
    assert estimated([group], "DrGRPO")[0] == [0.5, -0.5]
    found = flat(estimated([group, other], "ReinforcePlusPlusBaseline"))
    assert found == pytest.approx([1.224745, -1.224745, 0.0, 0.0], abs=1e-6)


def test_a_divergence_in_the_reward_is_taken_off_before_a_baseline() -> None:
    group = ScoredGroup([1.0, 1.0], [2, 1], [[0.1, 0.2], [0.1]])
    assert estimated([group], "RLOO")[0] == pytest.approx([-0.2, 0.2], abs=1e-12)


BASELINES = ("GroupMean", "LeaveOneOut", "LengthWeighted")


@pytest.mark.parametrize("baseline", BASELINES)
def test_failures_are_left_out_and_equal_rewards_teach_nothing(baseline: Any) -> None:
    def of(*rewards: float | None) -> list[float]:
        return compared(rewards, [1] * len(rewards), baseline, by_deviation=True)

    assert of(1.0, 1.0, 1.0) == [0.0, 0.0, 0.0]
    assert of(3.0) == [0.0]
    assert of(None, None) == [0.0, 0.0]
    assert of(0.7, None) == [0.0, 0.0]
    whole, part = of(1.0, 0.0, 0.25), of(1.0, None, 0.0, 0.25)
    assert part == [whole[0], 0.0, *whole[1:]]


def test_a_step_whose_rewards_are_all_equal_or_all_failed_has_no_advantage_under_any_algorithm() -> None:
    equal = [ScoredGroup([0.3] * 4, lengths) for lengths in LENGTHS]
    failed = [ScoredGroup([None] * 4, lengths) for lengths in LENGTHS]
    # Their reward counts against nothing, and is not trained on.
    for name in sorted(set(OBJECTIVES) - {"Distillation", "SFT"}):
        for groups in (equal, failed, []):
            assert set(flat(estimated(groups, name))) <= {0.0}, name


def test_one_group_that_failed_whole_changes_nothing_for_the_others() -> None:
    for name in OBJECTIVES:
        alone = estimated(GROUPS, name)
        beside = estimated([GROUPS[0], ScoredGroup([None, None], [0, 5]), GROUPS[1]], name)
        assert [beside[0], beside[2]] == alone, name
        assert beside[1] == [0.0, 0.0]


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e39])
def test_a_reward_that_fp32_cannot_hold_stops_the_step(name: str, reward: float) -> None:
    with pytest.raises(DivergedError, match="beyond what fp32 can hold"):
        estimated([ScoredGroup([0.0, reward], [1, 1])], name)


numbers = st.floats(-100, 100)
rollouts = st.tuples(st.none() | numbers, st.integers(1, 50))


@given(
    st.lists(st.lists(rollouts, min_size=1, max_size=6), min_size=1, max_size=5), st.sampled_from(sorted(OBJECTIVES))
)
def test_advantages_are_finite_and_of_their_group_alone_unless_normalised_over_the_batch(
    groups: list[list[tuple[float | None, int]]], name: str
) -> None:
    scored = [ScoredGroup([r for r, _ in group], [n for _, n in group]) for group in groups]
    found = estimated(scored, name)
    by_token = [each if isinstance(each, list) else [each] for each in flat(found)]
    assert all(math.isfinite(each) for each in flat(by_token))
    for group, advantages_G in zip(scored, found, strict=True):
        assert all(a == 0 for r, a in zip(group.rewards_G, advantages_G, strict=True) if r is None)
    if OBJECTIVES[name].normalize != "Batch":  # type: ignore[index]
        assert found == [estimated([group], name)[0] for group in scored]


def test_what_is_informative() -> None:
    assert is_informative([0.0, 1.0, None])
    for rewards in ([], [None], [1.0], [1.0, None], [0.5, 0.5]):
        assert not is_informative(rewards)


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (80, 0), (85, 0.5), (95, 1.5), (100, 2), (130, 2)])
def test_answers_near_the_limit_pay_in_proportion(length: int, expected: float) -> None:
    """DAPO eq. 13 with L_max 100 and L_cache 20, times a penalty of 2; verl 0.9's `DAPORewardManager` has no floor
    beyond L_max, which an answer does not reach."""
    assert overlong_penalty(length, longest=100, buffer_share=0.2, penalty=2.0) == pytest.approx(expected, abs=1e-12)
