"""Losses and advantages written by the user: loading them, and checking their results against the contract.

Belongs here: importing them by the manifest's names, and one clear error for any violation. Does not belong here: the
contract itself (`losses.Surrogate`, `advantages.AdvantageFunction`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from orbit_runtime.algorithms.advantages import REWARD_LIMIT, Advantage, ScoredGroup
from orbit_runtime.errors import ManifestError
from orbit_runtime.spec.algorithm import Algorithm
from orbit_runtime.workers.user_code.entrypoints import (
    MissingModuleError,
    TargetError,
    check_elsewhere,
    describe,
    hold_function,
    load_function,
)

if TYPE_CHECKING:
    from torch import Tensor

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
    """The user's loss, as a `Surrogate`. Pickled, it is its name: whoever receives it imports it."""

    function: Callable[..., Any]
    target: str
    search_path: tuple[str, ...] = ()
    """Absolute folders and archives; none for a function given from Python."""
    _problems: list[str] = field(default_factory=list, compare=False)

    def __call__(self, inputs: LossInputs, settings: PolicyLossSettings) -> TokenLosses:
        if not all(_finite(tensor) for tensor in _tensors(inputs).values()):
            return hold_loss(self.function, self.target, inputs, settings)
        losses = hold_loss(self.function, self.target, self._watched(inputs), settings)
        loss_T = losses.loss_T.detach()
        if not _finite(loss_T):
            token = int((~loss_T.isfinite()).nonzero()[0])
            self._problems.append(f"returned {float(loss_T[token])} for token {token} of {len(loss_T)}")
        return losses

    def take_problems(self) -> list[str]:
        """Returns, and forgets, where finite inputs gave values that are not finite. Call it after the backward pass.

        Not raised within a pass: one rank may find what the others do not, and all must reach the same outcome.
        """
        found = list(self._problems)
        self._problems.clear()
        return found

    def _watched(self, inputs: LossInputs) -> LossInputs:
        """Copies of the inputs that give access to this loss's own gradients."""

        def look(name: str, gradient: Tensor) -> None:
            if not _finite(gradient):
                self._problems.append(f"has a gradient for `inputs.{name}` that is not finite")

        seen = {}
        for name, tensor in _tensors(inputs).items():
            if tensor.requires_grad:
                seen[name] = tensor.view_as(tensor)
                seen[name].register_hook(partial(look, name))
        return replace(inputs, **seen)

    def __reduce__(self) -> tuple[Callable[..., OwnLoss], tuple[str, tuple[str, ...]]]:
        return import_loss, (self.target, self.search_path)


def _tensors(inputs: LossInputs) -> dict[str, Tensor]:
    found = {each.name: getattr(inputs, each.name) for each in fields(inputs)}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


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
    return OwnLoss(held, name) if field == LOSS else partial(hold_advantages, held, name)


def check_own(settings: Algorithm, search_path: Sequence[str]) -> list[str]:
    """Imports the manifest's functions in another process; returns those that failed only because torch is missing.
    It gets this process's variables, as the trainer that imports them does.

    Raises:
        ManifestError: a function does not exist or cannot be called.
    """
    unopened = []
    for where, target in own_targets(settings).items():
        try:
            check_elsewhere(target, ARGUMENTS[where], search_path, os.environ)
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
    except (TypeError, ValueError, OverflowError) as error:
        raise ManifestError(
            f"{target!r} returned no advantage for each rollout of each group: {error}",
            where=ADVANTAGES,
            fix="return a list for each group: for each of its rollouts a finite number, or one for each trained token",
        ) from error


def _advantage(value: Any, length: int) -> Advantage:
    if isinstance(value, Sequence) and not isinstance(value, _TEXT):
        numbers = [_number(each) for each in value]
        if len(numbers) != length:
            raise ValueError(f"{len(numbers)} numbers for {length} trained tokens")
    else:
        numbers = [_number(value)]
    if not all(abs(each) <= REWARD_LIMIT for each in numbers):  # NaN compares false
        raise ValueError("a number is not finite in fp32")
    return numbers if isinstance(value, Sequence) else numbers[0]


_TEXT = str | bytes | bytearray


def _number(value: Any) -> float:
    # float() would read text as well: what a column of a file holds is not yet a number.
    if isinstance(value, _TEXT):
        raise TypeError(f"{value!r} is text")
    return float(value)


def _called(function: Callable[..., Any], target: str, where: str, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        raise ManifestError(f"{target!r} fails: {describe(error)}", where=where, fix="correct the function") from error
