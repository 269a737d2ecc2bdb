"""Losses and advantages written by the user: loading them, and checking their results against the contract.

Belongs here: importing them by the manifest's names, and one clear error for any violation. Does not belong here: the
contract itself (`losses.Surrogate`, `advantages.AdvantageFunction`).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from orbit_runtime.algorithms.advantages import Advantage, ScoredGroup
from orbit_runtime.errors import ManifestError
from orbit_runtime.spec.algorithm import Algorithm
from orbit_runtime.workers.entrypoints import (
    MissingModuleError,
    TargetError,
    check_elsewhere,
    describe,
    hold_function,
    load_function,
)

if TYPE_CHECKING:
    from orbit_runtime.algorithms.constants import PolicyLossSettings
    from orbit_runtime.algorithms.losses import LossInputs, TokenLosses

LOSS, ADVANTAGES = "spec.algorithm.entrypoint", "spec.algorithm.advantage.entrypoint"
ARGUMENTS = {LOSS: ("inputs", "settings"), ADVANTAGES: ("groups",)}


def own_targets(settings: Algorithm) -> dict[str, str]:
    """Field path → `module:function`, for the functions that the manifest names."""
    named = {LOSS: settings.entrypoint, ADVANTAGES: settings.advantage.entrypoint}
    return {where: target for where, target in named.items() if target is not None}


def load_own(settings: Algorithm, field: str, search_path: Sequence[str]) -> Callable[..., Any] | None:
    """The function that the manifest names in this field, `LOSS` or `ADVANTAGES`, with contract checks; None if unset.

    Raises:
        ManifestError: it cannot be imported or called.
    """
    target = own_targets(settings).get(field)
    if target is None:
        return None
    if field == LOSS:
        return import_loss(target, [os.path.abspath(folder) for folder in search_path])
    return partial(hold_advantages, _imported(target, field, search_path), target)


def _imported(target: str, field: str, search_path: Sequence[str]) -> Callable[..., Any]:
    # Permanent: a function may import more modules when it is called.
    sys.path[:] = list(dict.fromkeys([*search_path, *sys.path]))
    try:
        return load_function(target, ARGUMENTS[field])
    except TargetError as error:
        raise ManifestError(str(error), where=field) from error


@dataclass(frozen=True)
class OwnLoss:
    """The loss that a manifest names, as a `Surrogate`. Pickled, it is its name: whoever receives it imports it."""

    function: Callable[..., Any]
    target: str
    search_path: tuple[str, ...]
    """Absolute folders and archives."""

    def __call__(self, inputs: LossInputs, settings: PolicyLossSettings) -> TokenLosses:
        return hold_loss(self.function, self.target, inputs, settings)

    def __reduce__(self) -> tuple[Callable[..., OwnLoss], tuple[str, tuple[str, ...]]]:
        return import_loss, (self.target, self.search_path)


def import_loss(target: str, search_path: Sequence[str]) -> OwnLoss:
    """Raises ManifestError if it cannot be imported here, or called."""
    return OwnLoss(_imported(target, LOSS, search_path), target, tuple(search_path))


def hold_given(function: Any, field: str) -> Callable[..., Any]:
    """A function passed from Python, wrapped as by `load_own`.

    Raises:
        ManifestError: it cannot be called with the contract's arguments.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    try:
        held = hold_function(function, name, ARGUMENTS[field])
    except TargetError as error:
        raise ManifestError(str(error), where=field) from error
    return partial(hold_loss if field == LOSS else hold_advantages, held, name)


def check_own(settings: Algorithm, search_path: Sequence[str]) -> list[str]:
    """Imports the manifest's functions in another process; returns those that failed only because torch is missing.

    Raises:
        ManifestError: a function does not exist or cannot be called.
    """
    unopened = []
    for where, target in own_targets(settings).items():
        try:
            check_elsewhere(target, ARGUMENTS[where], search_path)
        except MissingModuleError as error:
            # A machine on which manifests are written need not have torch.
            if error.name.partition(".")[0] != "torch":
                raise ManifestError(str(error), where=where) from error
            unopened.append(f"{target} (needs torch)")
        except TargetError as error:
            raise ManifestError(str(error), where=where) from error
    return unopened


def hold_loss(
    function: Callable[..., Any], target: str, inputs: LossInputs, settings: PolicyLossSettings
) -> TokenLosses:
    """The function as a `Surrogate`: it may return just a tensor; any other result is one clear error."""
    from orbit_runtime.algorithms.losses import TokenLosses

    result = _called(function, target, LOSS, inputs, settings)
    losses = result if isinstance(result, TokenLosses) else TokenLosses(result)
    shape = getattr(losses.loss_T, "shape", None)
    if shape != inputs.logprobs_T.shape:
        told = type(losses.loss_T).__name__ if shape is None else f"a tensor of shape {tuple(shape)}"
        raise ManifestError(
            f"{target!r} returned {told}, not a loss for each of {len(inputs.logprobs_T)} tokens",
            where=LOSS,
            fix="return a tensor like `inputs.logprobs_T`, or TokenLosses; the mean is taken by `reduction`",
        )
    if inputs.logprobs_T.requires_grad and not losses.loss_T.requires_grad:
        raise ManifestError(
            f"{target!r} returned a loss without gradient: it does not depend on `inputs.logprobs_T`",
            where=LOSS,
            fix="compute it from `inputs.logprobs_T`, without `detach()` or `torch.no_grad()` around all of it",
        )
    return losses


def hold_advantages(
    function: Callable[..., Any], target: str, groups_P: Sequence[ScoredGroup]
) -> list[list[Advantage]]:
    """The function as an `AdvantageFunction`."""
    result = _called(function, target, ADVANTAGES, groups_P)
    try:
        return [
            [_advantage(each, length) for each, length in zip(advantages_G, group.lengths_G, strict=True)]
            for advantages_G, group in zip(result, groups_P, strict=True)
        ]
    except (TypeError, ValueError) as error:
        raise ManifestError(
            f"{target!r} returned no advantage for each rollout of each group: {error}",
            where=ADVANTAGES,
            fix="return a list for each group: for each of its rollouts a finite number, or one for each trained token",
        ) from error


def _advantage(value: Any, length: int) -> Advantage:
    if isinstance(value, Sequence) and not isinstance(value, str):
        numbers = [float(each) for each in value]
        if len(numbers) != length:
            raise ValueError(f"{len(numbers)} numbers for {length} trained tokens")
    else:
        numbers = [float(value)]
    if not all(math.isfinite(each) for each in numbers):
        raise ValueError("a number is not finite")
    return numbers if isinstance(value, Sequence) else numbers[0]


def _called(function: Callable[..., Any], target: str, where: str, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        raise ManifestError(f"{target!r} fails: {describe(error)}", where=where, fix="correct the function") from error
