"""KL inside the reward, in plain floats: each token's penalty for its distance from the reference.

Belongs here: the penalty. Does not belong here: KL in the loss (`divergence`), which has a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from orbit_runtime.algorithms.constants import LOG_RATIO_LIMIT
from orbit_runtime.spec.objectives import KLEstimator

_ESTIMATORS: Mapping[str, Callable[[float], float]] = {
    "K1": lambda d: -d,
    "K2": lambda d: d * d / 2,
    "K3": lambda d: math.expm1(d) - d,
}


def kl_penalties(
    logprobs_T: Sequence[float], reference_logprobs_T: Sequence[float], *, coefficient: float, estimator: KLEstimator
) -> list[float]:
    """coefficient * KL_t of each trained token of a rollout, to be subtracted from its reward (arXiv:2203.02155 eq. 2).

    With d = log(reference) - log(policy), under the policy that sampled: K1 is -d, K2 d²/2, K3 e^d - 1 - d
    (`divergence.kl_estimate`). A penalty has no gradient of its own, so only the value matters, and K1 estimates it
    without bias: https://arxiv.org/abs/2506.09477.

    Example: `kl_penalties([-1.0], [-1.5], coefficient=0.1, estimator="K1") == [0.05]`
    """
    term = _ESTIMATORS[estimator]
    return [
        coefficient * term(max(-LOG_RATIO_LIMIT, min(LOG_RATIO_LIMIT, reference - policy)))
        for policy, reference in zip(logprobs_T, reference_logprobs_T, strict=True)
    ]
