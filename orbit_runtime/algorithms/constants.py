"""The constants of a loss and of a correction: plain values, which also travel to other processes; no torch.

Belongs here: records. Does not belong here: the arithmetic (`losses`, `corrections`).
"""

from __future__ import annotations

from dataclasses import dataclass

from orbit_runtime.spec.objectives import CorrectionType, KLEstimator


@dataclass(frozen=True, slots=True)
class PolicyLossSettings:
    """The constants of a policy loss."""

    clip_low: float | None = 0.2
    """None: no lower bound."""
    clip_high: float = 0.2
    kl_coefficient: float = 0.0
    """Weight of the KL term inside the loss; 0.0 where KL is off or placed in the reward."""
    kl_estimator: KLEstimator = "K3"
    kl_weighted: bool = False
    """The KL term is multiplied by the ratio."""
    teacher_coefficient: float = 0.0
    """Weight of the divergence from the teacher; 0.0: there is none."""
    teacher_beta: float = 1.0
    """Which divergence (`distillation`), where it is estimated from the sampled tokens."""


@dataclass(frozen=True, slots=True)
class Correction:
    """What the ratio trainer / engine is taken of, and held against."""

    type: CorrectionType
    cap: float
    floor: float | None = None
    """Of the masked types."""
    veto: float | None = None
    """A sample with a token below this counts for nothing."""
