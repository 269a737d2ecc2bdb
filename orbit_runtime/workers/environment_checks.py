"""What is visible of an environment's class before an object of it exists.

Belongs here: whether it can be made and called as an episode will. Does not belong here: importing it (`entrypoints`),
or what its methods return (`environment_cell`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from orbit_runtime.workers.entrypoints import TargetError

CALLS = {"reset": ("prompt", "fields", "seed"), "step": ("completion",)}
"""Method → what it is called with, of an environment that answers the policy."""
PLAY_CALLS = {"play": ("policy", "prompt", "fields", "seed")}
"""The same of one that asks the policy itself."""
WANTED = "reset(prompt, fields, seed) and step(completion), or play(policy, prompt, fields, seed)"


def check_environment(environment: Any, target: str, arguments: Mapping[str, Any]) -> None:
    """Checks a class, or a function that makes environments, without calling it.

    A class that finds its methods by `__getattr__` or sets them in `__init__`, and whatever has no signature, show
    their mistakes in the first episode only.

    Args:
        target: its name in messages.
        arguments: what each object will be made with.

    Raises:
        TargetError: it is nothing to call, does not take `arguments`, lacks a method, or has one that takes others.
    """
    if not callable(environment):
        raise TargetError(f"{target!r} is not a class but {type(environment).__name__}")
    if isinstance(environment, type) and not hasattr(environment, "play"):
        for name in CALLS:
            if not hasattr(environment, name) and not _sets(environment, name):
                raise TargetError(f"{target!r} has no method `{name}`")
    try:
        inspect.signature(environment).bind(**arguments)
    except TypeError as error:
        given = ", ".join(arguments)
        raise TargetError(f"{target!r} cannot be called with spec.environment.arguments ({given}): {error}") from error
    except ValueError:
        pass  # built in C without a signature: the first episode will tell
    for name, names in (PLAY_CALLS if hasattr(environment, "play") else CALLS).items():
        _check_method(environment, name, names, target)


def _check_method(environment: Any, name: str, names: tuple[str, ...], target: str) -> None:
    method = inspect.getattr_static(environment, name, None)
    if not isinstance(environment, type) or not isinstance(method, FunctionType):
        return
    try:
        inspect.signature(method).bind("self", *names)
    except TypeError as error:
        raise TargetError(f"`{name}` of {target!r} cannot be called as ({', '.join(names)}): {error}") from error


def _sets(environment: type, name: str) -> bool:
    """Whether its objects may have the attribute although the class does not."""
    if hasattr(environment, "__getattr__"):
        return True
    code = getattr(environment.__init__, "__code__", None)  # type: ignore[misc]  # only its names are looked at
    return code is not None and name in code.co_names
