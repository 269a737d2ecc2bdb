"""Settings that determine the arithmetic of a step, besides the policy and the samples.

Belongs here: plain values, which are also sent to other processes. Does not belong here: deriving them from a manifest
(`loop.build`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orbit_runtime.algorithms.constants import Correction, PolicyLossSettings
from orbit_runtime.policy.distance import Measure
from orbit_runtime.spec.objectives import Reduction
from orbit_runtime.spec.teacher import TeacherType
from orbit_runtime.training.schedule import Schedule
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
    """None to compare the log-probs of the sampled tokens."""
    decay: float | None = None
    """Decay of an averaged teacher."""
    every_steps: int | None = None
    """Update interval of a lagging teacher."""


@dataclass(frozen=True)
class TrainerSettings:
    """Everything the arithmetic of a step depends on, in the units of the manifest."""

    peak_learning_rate: float
    schedule: Schedule
    warmup_steps: int
    decay_steps: int
    weight_decay: float
    max_grad_norm: float
    micro_batch_tokens: int
    mini_batch_prompts: int | None
    update_epochs: int
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
