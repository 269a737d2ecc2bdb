"""What the arithmetic of a step depends on, besides the policy and the samples.

Belongs here: plain values, which also travel to other processes. Does not belong here: how they follow from a manifest
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
    """Of a critic, beside what it shares with the policy."""

    peak_learning_rate: float
    value_clip: float
    warmup_steps: int
    rank: int | None = None
    """LoRA; None: the policy's."""


@dataclass(frozen=True, slots=True)
class TeacherSettings:
    """Who teaches, and what is compared."""

    type: TeacherType
    measure: Measure | None
    """None: the log-probs of the sampled tokens."""
    decay: float | None = None
    """Of an average."""
    every_steps: int | None = None
    """Of one that lags."""


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
    """Of trainer/sampler importance weights; `None`: the sampling side's log-probs are the old ones."""
    sampling: Sampling
    """What the samples' tokens were drawn by."""
    base_model: str
    """Named in the published `adapter_config.json`."""
    seed: int = 0
    """Of dropout."""
    router_replay: RouterReplay = "None"
    """`Replay`: every pass sends tokens to the experts that rollout chose, the reference's too. With it and with
    `Record` a step measures parity with and without."""
    critic: CriticSettings | None = None
    teacher: TeacherSettings | None = None
