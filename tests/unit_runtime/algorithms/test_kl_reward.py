"""The KL penalty in the reward, against numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from orbit_runtime.algorithms.kl_reward import kl_penalised_rewards


@pytest.mark.parametrize(
    ("estimator", "penalty"),
    # d = log(reference) - log(policy) is -0.5 and 0.2 for the two tokens.
    [("K1", 0.5 - 0.2), ("K2", (0.25 + 0.04) / 2), ("K3", math.exp(-0.5) - 1 + 0.5 + math.exp(0.2) - 1 - 0.2)],
)
def test_the_penalty_is_the_sum_over_tokens(estimator: str, penalty: float) -> None:
    (found,) = kl_penalised_rewards(
        [1.0],
        [[-1.0, -2.0]],
        [[-1.5, -1.8]],
        coefficient=0.1,
        estimator=estimator,  # type: ignore[arg-type]
    )
    assert found == pytest.approx(1.0 - 0.1 * penalty, abs=1e-12)


def test_a_failed_reward_stays_failed() -> None:
    assert kl_penalised_rewards([None, 2.0], [[], []], [[], []], coefficient=0.1, estimator="K1") == [None, 2.0]
