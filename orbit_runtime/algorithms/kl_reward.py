"""KL inside the reward, in plain floats: what a rollout is worth after paying for its distance from the reference.

Belongs here: the penalty. Does not belong here: KL in the loss (`losses`), which has a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

KLEstimator = Literal["K1", "K2", "K3"]

_ESTIMATORS: Mapping[str, Callable[[float], float]] = {
    "K1": lambda d: -d,
    "K2": lambda d: d * d / 2,
    "K3": lambda d: math.expm1(d) - d,
}
LOG_RATIO_LIMIT = 20.0


def kl_penalised_rewards(
    rewards_G: Sequence[float | None],
    logprobs_G: Sequence[Sequence[float]],
    reference_logprobs_G: Sequence[Sequence[float]],
    *,
    coefficient: float,
    estimator: KLEstimator,
) -> list[float | None]:
    """r_i - coefficient * sum_t KL_t: the penalty inside the reward, before advantages (arXiv:2203.02155 eq. 2).

    With d = log(reference) - log(policy) per trained token: K1 is -d, K2 d²/2, K3 e^d - 1 - d (`losses.kl_estimate`).
    `logprobs_G[i]` are one rollout's trained tokens under the policy that sampled them. A reward of `None` stays so.

    Example: `kl_penalised_rewards([1.0], [[-1.0]], [[-1.5]], coefficient=0.1, estimator="K1") == [0.95]`
    """
    term = _ESTIMATORS[estimator]
    penalised: list[float | None] = []
    for reward, logprobs_T, reference_T in zip(rewards_G, logprobs_G, reference_logprobs_G, strict=True):
        if reward is None:
            penalised.append(None)
            continue
        ratios = [b - a for a, b in zip(logprobs_T, reference_T, strict=True)]
        kl = math.fsum(term(max(-LOG_RATIO_LIMIT, min(LOG_RATIO_LIMIT, d))) for d in ratios)
        penalised.append(reward - coefficient * kl)
    return penalised
