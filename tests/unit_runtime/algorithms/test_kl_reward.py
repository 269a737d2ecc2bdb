"""The KL penalty in the reward, against numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from orbit_runtime.algorithms.advantages import ScoredGroup, kl_penalties


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # d = log(reference) - log(policy) is -0.5 and 0.2 for the two tokens.
    [
        ("K1", [0.5, -0.2]),
        ("K2", [0.25 / 2, 0.04 / 2]),
        ("K3", [math.exp(-0.5) - 1 + 0.5, math.exp(0.2) - 1 - 0.2]),
    ],
)
def test_each_token_pays_for_its_own_distance(estimator: str, expected: list[float]) -> None:
    found = kl_penalties([-1.0, -2.0], [-1.5, -1.8], coefficient=0.1, estimator=estimator)  # type: ignore[arg-type]
    assert found == pytest.approx([0.1 * each for each in expected], abs=1e-12)


def test_a_rollout_pays_what_its_tokens_pay_and_a_failed_reward_stays_failed() -> None:
    group = ScoredGroup([1.0, None], [2, 1], [[0.25, 0.5], []])
    assert group.totals_G == [0.25, None]
