"""From the rewards of a group to an advantage per rollout.

Belongs here: baselines and their normalisation, in plain floats. Does not belong here: rewards themselves, or losses.
`_G` the rollouts of one prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from orbit_runtime.errors import DivergedError

Normalize = Literal["Group", "None"]

STD_EPSILON = 1e-4
"""Added to the standard deviation, as in TRL 1.16 (`GRPOTrainer`, `scale_rewards="group"`)."""
REWARD_LIMIT = 3.4028234663852886e38
"""The largest fp32 number: advantages are trained on in fp32."""


def group_advantages(rewards_G: Sequence[float | None], *, normalize: Normalize) -> list[float]:
    """A_i = r_i - mean(r), divided by std(r) + 1e-4 when `normalize` is `Group` (GRPO, arXiv:2402.03300, section
    4.1.2).

    The standard deviation is the unbiased one (n - 1), as `torch.std` and TRL 1.16 have it. `None` normalises
    nothing, as Dr. GRPO (arXiv:2503.20783) proposes.

    A reward of `None` (timeout or crash) is no observation: it is left out of mean and deviation and gets advantage
    0.0. Fewer than two rewards, or rewards that are all equal, compare nothing: every advantage is exactly 0.0.

    Raises:
        DivergedError: a reward, after weights and penalties, is no fp32 number.

    Example: `group_advantages([1.0, 0.0, None], normalize="None") == [0.5, -0.5, 0.0]`
    """
    valid = [reward for reward in rewards_G if reward is not None]
    for reward in valid:
        if not abs(reward) <= REWARD_LIMIT:  # NaN compares false
            raise DivergedError(
                f"a reward of {reward:.3g} is beyond what fp32 can hold",
                where="spec.environment.rewards",
                fix="scale the reward or its weight so that values are of the order of 1; the rollouts are kept in "
                "failures/",
            )
    if len(valid) < 2 or min(valid) == max(valid):
        return [0.0] * len(rewards_G)
    mean = math.fsum(valid) / len(valid)
    scale = 1.0
    if normalize == "Group":
        variance = math.fsum((reward - mean) ** 2 for reward in valid) / (len(valid) - 1)
        scale = math.sqrt(variance) + STD_EPSILON
    return [0.0 if reward is None else (reward - mean) / scale for reward in rewards_G]
