"""The algorithms a manifest can name.

Belongs here: one row per algorithm. Does not belong here: the arithmetic it points to, or its settings' defaults
(`spec`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from orbit_runtime.algorithms.advantages import group_advantages
from orbit_runtime.algorithms.losses import policy_loss
from orbit_runtime.spec.algorithm import Algorithm as Settings
from orbit_runtime.types import ColumnName


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What a step calls, in this order."""

    needs: Callable[[Settings], frozenset[ColumnName]]
    """Columns that must have been scored before advantages are computed."""
    advantages: Callable[..., list[float]]
    """Rewards of one group -> an advantage per rollout."""
    loss: Callable[..., object]
    """Log-probs, advantages and weights of a micro-batch -> (loss, sums)."""


def _needs_reference(settings: Settings) -> frozenset[ColumnName]:
    return frozenset({"reference"} if settings.kl.coefficient > 0 else ())


ALGORITHMS: Mapping[str, Algorithm] = {
    "GRPO": Algorithm(needs=_needs_reference, advantages=group_advantages, loss=policy_loss)
}
