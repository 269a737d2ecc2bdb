"""Settings that determine the arithmetic of a step, besides the policy and the samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from orbit_runtime.algorithms.constants import Correction, PolicyLossSettings
from orbit_runtime.policy.distance import Measure
from orbit_runtime.spec.objectives import Reduction
from orbit_runtime.spec.teacher import TeacherType
from orbit_runtime.spec.training import Schedule, Training
from orbit_runtime.types import Sampling

RouterReplay = Literal["None", "Record", "Replay"]


@dataclass(frozen=True, slots=True)
class CriticSettings:
    """Settings of a critic, in addition to those that it shares with the policy."""

    peak_learning_rate: float
    value_clip: float
    warmup_steps: int
    rank: int | None = None
    """LoRA rank; None for the policy's."""


@dataclass(frozen=True, slots=True)
class TeacherSettings:
    """The teacher, and what is compared with it."""

    type: TeacherType
    measure: Measure | None
    """The distance to measure; None to compare the log-probs of the sampled tokens."""
    decay: float | None = None
    """Decay of an averaged teacher."""
    every_steps: int | None = None
    """Update interval of a lagging teacher."""


@dataclass(frozen=True)
class TrainerSettings:
    """Everything the arithmetic of a step depends on, in the units of the manifest."""

    training: Training
    decay_steps: int
    """The step at which the schedule ends: the one that the first start decided."""
    loss: PolicyLossSettings
    reduction: Reduction
    constant_length: int
    """Tokens that the `Constant` reduction divides by: the longest completion allowed."""
    correction: Correction | None
    """Trainer/sampler importance weights; `None` to take the sampler's log-probs as the old ones."""
    sampling: Sampling
    """The settings with which the samples' tokens were drawn."""
    base_model: str
    """Name recorded in the published `adapter_config.json`."""
    seed: int = 0
    """Seed of dropout."""
    router_replay: RouterReplay = "None"
    """`Replay`: every pass, the reference's included, sends tokens to the experts chosen during rollout. With `Replay`
    and `Record`, a step measures parity with and without those experts."""
    critic: CriticSettings | None = None
    teacher: TeacherSettings | None = None


def learning_rate(step: int, schedule: Schedule, *, peak: float, decay_steps: int) -> float:
    """Rate of step number `step`, counted from 0; all optimizer updates of a step share it.

    Warm-up rises linearly and reaches `peak` at step `warmup_steps`. `Linear` then falls to 0 at `decay_steps`,
    `Cosine` as `peak * (1 + cos(pi * progress)) / 2` (Loshchilov and Hutter, arXiv:1608.03983, eq. 5 with one period).
    """
    warmup_steps = schedule.warmup_steps
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule.type == "Constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
    if schedule.type == "Linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
