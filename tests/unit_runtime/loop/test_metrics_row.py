"""What a metrics row takes from rollouts."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from orbit_runtime.environments.episodes import combine
from orbit_runtime.loop.metrics_row import reward_parts
from orbit_runtime.types import Rollout
from orbit_runtime.workers.user_code.reward_protocol import RewardResult

WEIGHTS = {"correct": 1.0, "brevity": 0.25}


def rollout(**results: RewardResult) -> Rollout:
    """Scored as the environment scores it."""
    reward, outcome = combine(list(results.values()), [WEIGHTS[name] for name in results])
    parts: Mapping[str, float | None] = {name: result.value for name, result in results.items()}
    return Rollout("r", 1, "p", 0, (), (), (), (), (), reward, outcome, parts, "stop")


def value(number: float) -> RewardResult:
    return RewardResult("value", number)


ROLLOUTS = [
    rollout(correct=value(1.0), brevity=value(0.5)),
    rollout(correct=value(0.0), brevity=value(1.0)),
    rollout(correct=RewardResult("wrong", 0.0), brevity=value(0.9)),
    rollout(correct=value(1.0), brevity=RewardResult("timeout", None)),
]
"""The last one failed: it is masked."""


def test_the_parts_of_several_rewards_by_hand() -> None:
    assert reward_parts(ROLLOUTS) == {
        "reward_part_correct_mean": pytest.approx(1 / 3),
        "reward_part_brevity_mean": pytest.approx(0.8),
    }


def test_the_parts_times_their_weights_add_up_to_the_mean_reward() -> None:
    scored = [each.reward for each in ROLLOUTS if each.reward is not None]
    total = sum(WEIGHTS[name] * (reward_parts(ROLLOUTS)[f"reward_part_{name}_mean"] or 0.0) for name in WEIGHTS)
    assert math.isclose(total, sum(scored) / len(scored))


def test_one_reward_has_no_parts_and_a_step_without_a_score_no_means() -> None:
    assert reward_parts([rollout(correct=value(1.0))]) == {}
    assert reward_parts([]) == {}
    assert reward_parts(ROLLOUTS[3:]) == {"reward_part_correct_mean": None, "reward_part_brevity_mean": None}
