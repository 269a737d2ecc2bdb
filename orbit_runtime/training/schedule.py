"""Learning rate as a function of the step number.

Belongs here: schedules, as pure functions. Does not belong here: the optimiser.
"""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["Constant", "Linear", "Cosine"]


def learning_rate(step: int, *, peak: float, schedule: Schedule, warmup_steps: int, decay_steps: int) -> float:
    """Rate of step number `step`, counted from 0; all optimizer updates of a step share it.

    Warm-up rises linearly and reaches `peak` at step `warmup_steps`. `Linear` then falls to 0 at `decay_steps`,
    `Cosine` as `peak * (1 + cos(pi * progress)) / 2` (Loshchilov and Hutter, arXiv:1608.03983, eq. 5 with one period).
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "Constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
    if schedule == "Linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
