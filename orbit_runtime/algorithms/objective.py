"""The loss that a row of `spec.objectives` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from orbit_runtime.algorithms.custom_loss import OwnLoss
from orbit_runtime.algorithms.losses import Surrogate, clipped, clipped_weights, likelihood, nothing, policy_loss
from orbit_runtime.algorithms.ratios import SEQUENCE_RATIOS
from orbit_runtime.spec.algorithm import Algorithm as Settings

SURROGATES: Mapping[str, Callable[..., Any]] = {"Clipped": clipped, "ClippedWeights": clipped_weights}


def build_loss(settings: Settings, *, own_loss: Surrogate | None = None) -> Callable[..., Any]:
    """`losses.policy_loss` with this algorithm's surrogate.

    Args:
        own_loss: the user's loss, if the manifest names one.
    """
    objective = settings.objective
    if objective.surrogate == "Own":
        assert own_loss is not None, "an own objective comes with its loss"
        surrogate: Surrogate = own_loss
    elif objective.surrogate == "Teacher":
        surrogate = nothing
    elif objective.surrogate == "Likelihood":
        surrogate = likelihood
    else:
        surrogate = partial(SURROGATES[objective.surrogate], sequence_ratio=SEQUENCE_RATIOS[objective.ratio])
    return partial(policy_loss, surrogate=surrogate)


def own_loss_of(loss: Callable[..., Any]) -> OwnLoss | None:
    """The user's loss within what `build_loss` returned; None if it has a shipped one."""
    surrogate = getattr(loss, "keywords", {}).get("surrogate")
    return surrogate if isinstance(surrogate, OwnLoss) else None
