"""The advantages and constants that a row of `spec.objectives` names; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from orbit_runtime.algorithms.advantages import (
    GAE,
    AdvantageFunction,
    critic_returns,
    estimate_advantages,
)
from orbit_runtime.algorithms.constants import Correction, PolicyLossSettings
from orbit_runtime.spec.algorithm import Algorithm as Settings
from orbit_runtime.types import ColumnName


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The functions that a step calls before it trains, in this order."""

    needs: frozenset[ColumnName]
    """Columns that must be scored before advantages are computed."""
    advantages: AdvantageFunction
    returns: AdvantageFunction | None = None
    """The critic's targets at each token; None without a critic."""


def loss_settings(settings: Settings) -> PolicyLossSettings:
    """The constants of the algorithm's loss."""
    objective, teacher = settings.objective, settings.teacher
    return PolicyLossSettings(
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        kl_coefficient=settings.kl.coefficient if objective.kl_placement == "Loss" else 0.0,
        kl_estimator=objective.kl_estimator,
        kl_weighted=settings.kl.importance_weighted,
        teacher_coefficient=teacher.coefficient if teacher else 0.0,
        teacher_beta=teacher.beta if teacher else 1.0,
    )


def correction_of(settings: Settings) -> Correction | None:
    """The correction of trainer against engine; None if there is none."""
    asked = settings.importance_sampling
    return None if asked.type == "None" else Correction(asked.type, *asked.bounds, asked.veto)


def build_algorithm(settings: Settings, *, own_advantages: AdvantageFunction | None = None) -> Algorithm:
    """Args: own_advantages: the user's advantages, if the manifest names any."""
    objective = settings.objective
    critic = settings.decided_critic
    gae = GAE(critic.gamma, critic.gae_lambda) if critic else None
    if own_advantages is not None:
        advantages = own_advantages
    else:
        assert objective.baseline is not None
        assert objective.normalize is not None
        advantages = partial(estimate_advantages, baseline=objective.baseline, normalize=objective.normalize, gae=gae)
    needs: frozenset[ColumnName] = frozenset({"reference"} if settings.kl.coefficient > 0 else ())
    needs |= frozenset({"value"} if gae else ())
    needs |= frozenset({"teacher"} if settings.teacher and settings.teacher.is_column else ())
    return Algorithm(needs, advantages, partial(critic_returns, gae=gae) if gae else None)
