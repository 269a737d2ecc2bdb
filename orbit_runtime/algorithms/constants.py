"""The constants of a loss and of a correction: plain values, which are also sent to other processes; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from orbit_runtime.spec.objectives import CorrectionType, KLEstimator

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this: e^20 is far outside every clip range, and an infinite ratio times a zero advantage
is NaN."""


@dataclass(frozen=True, slots=True)
class PolicyLossSettings:
    """The constants of a policy loss."""

    clip_low: float | None = 0.2
    """No lower bound if None."""
    clip_high: float = 0.2
    kl_coefficient: float = 0.0
    """Weight of the KL term inside the loss; 0.0 if KL is off or part of the reward."""
    kl_estimator: KLEstimator = "K3"
    kl_weighted: bool = False
    """Whether the KL term is multiplied by the ratio."""
    teacher_coefficient: float = 0.0
    """Weight of the divergence from the teacher; 0.0 without a teacher."""
    teacher_beta: float = 1.0
    """Selects the divergence (`distillation`) if it is estimated from the sampled tokens."""


@dataclass(frozen=True, slots=True)
class Correction:
    """How the trainer/engine ratio is computed, and its bounds."""

    type: CorrectionType
    cap: float
    floor: float | None = None
    """Lower bound of the masked types."""
    veto: float | None = None
    """A sample with a token ratio below this has weight 0."""
