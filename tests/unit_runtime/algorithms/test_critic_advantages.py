"""GAE and a critic's returns against the paper's sum written out, and against numbers worked by hand."""

from __future__ import annotations

import math
import random

import pytest

from orbit_runtime.algorithms.advantages import (
    GAE,
    ScoredGroup,
    critic_advantages,
    critic_returns,
    estimate_advantages,
)
from orbit_runtime.errors import DivergedError


def written_out(rewards_T: list[float], values_T: list[float], end: float, gamma: float, lam: float) -> list[float]:
    """Schulman et al. 2016, eq. 16: A_t = sum over l of (gamma lambda)^l delta_{t+l}, delta as in eq. 9."""
    following = [*values_T[1:], end]
    deltas = [r + gamma * after - value for r, after, value in zip(rewards_T, following, values_T, strict=True)]
    return [
        math.fsum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


@pytest.mark.parametrize("end", [None, 0.7])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.5, 1.0), (0.0, 0.5)])
def test_advantages_are_the_papers_sum(gamma: float, lam: float, end: float | None) -> None:
    draw = random.Random(7)
    values = [[draw.gauss(0, 1) for _ in range(length)] for length in (1, 5, 40)]
    penalties = [[draw.gauss(0, 0.1) for _ in each] for each in values]
    rewards = [0.3, -1.0, 2.0]
    given = [each if end is None else [*each, end] for each in values]
    group = ScoredGroup(rewards, [len(each) for each in values], penalties, given)
    found = critic_advantages(group, GAE(gamma, lam))
    for advantages, reward, paid, value in zip(found, rewards, penalties, values, strict=True):
        earned = [-each for each in paid]
        earned[-1] += reward
        assert advantages == pytest.approx(written_out(earned, value, end or 0.0, gamma, lam), abs=1e-9)


def test_three_tokens_worked_by_hand() -> None:
    """Reward 1, values 0.5, 0.2, 0.4; gamma 0.5, lambda 0.5. Deltas: 0.5 * 0.2 - 0.5 = -0.4; 0.5 * 0.4 - 0.2 = 0;
    1 - 0.4 = 0.6. Advantages: 0.6; 0 + 0.25 * 0.6 = 0.15; -0.4 + 0.25 * 0.15 = -0.3625."""
    group = ScoredGroup([1.0], [3], values_GT=[[0.5, 0.2, 0.4]])
    gae = GAE(0.5, 0.5)
    assert critic_advantages(group, gae)[0] == pytest.approx([-0.3625, 0.15, 0.6])
    assert critic_returns([group], gae)[0][0] == pytest.approx([0.1375, 0.35, 1.0])


def test_without_discount_an_advantage_is_the_reward_less_the_value_and_a_return_the_reward() -> None:
    group = ScoredGroup([1.0], [3], values_GT=[[0.5, 0.2, 0.4]])
    assert critic_advantages(group, GAE(1.0, 1.0))[0] == pytest.approx([0.5, 0.8, 0.6])
    assert critic_returns([group], GAE(1.0, 1.0))[0][0] == pytest.approx([1.0, 1.0, 1.0])


def test_what_is_expected_after_a_cut_answer_is_earned_with_its_last_token() -> None:
    """Reward 0, the critic expects 0.6 behind the cut; gamma 0.5: delta of the last token 0.5 * 0.6 - 0.4 = -0.1."""
    group = ScoredGroup([0.0, 0.0], [2, 2], values_GT=[[0.0, 0.4, 0.6], [0.0, 0.4]])
    cut, ended = critic_advantages(group, GAE(0.5, 1.0))
    assert cut == pytest.approx([0.2 - 0.05, -0.1])
    assert ended == pytest.approx([0.2 - 0.2, -0.4])


def test_a_failed_reward_is_no_observation() -> None:
    group = ScoredGroup([1.0, None], [2, 3], values_GT=[[0.5, 0.5], []])
    whole = estimate_advantages([group], baseline="Critic", normalize="Batch", gae=GAE(1.0, 0.5))
    alone = estimate_advantages(
        [ScoredGroup([1.0], [2], values_GT=[[0.5, 0.5]])], baseline="Critic", normalize="Batch", gae=GAE(1.0, 0.5)
    )
    assert whole[0] == [alone[0][0], 0.0]
    assert sum(alone[0][0]) == pytest.approx(0.0)  # type: ignore[arg-type]
    assert critic_returns([group], GAE(1.0, 1.0))[0][1] == 0.0


def test_a_reward_that_is_no_number_is_told() -> None:
    with pytest.raises(DivergedError):
        critic_advantages(ScoredGroup([math.nan], [1], values_GT=[[0.0]]), GAE(1.0, 1.0))
