"""Loads what a manifest names as `module:name`.

Belongs here: importing it, reporting what is wrong with it, and doing so in a separate process for callers that only
want to check. Does not belong here: what it is used for.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from orbit_runtime.workers.child.process import PACKAGE_ROOT, child_environment, import_path

CHECK_SECONDS = 120.0
_VARIABLE = re.compile(r"\benv(ironment)?[ _](var|variable)s?\b", re.IGNORECASE)
FROM_PYTHON = "given:from_python"
"""Placeholder in a manifest for a function that the program which started the run had passed."""


class TargetError(Exception):
    """The target cannot be loaded or called in the way that the manifest describes; the message is for the user."""


class MissingModuleError(TargetError):
    """The function's module needs another module that is not installed here; `name` is the missing one."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


def load_object(target: str) -> Any:
    """Imports the object that `module:name` names.

    Raises:
        TargetError: names the missing module or attribute, and the folders that were searched.
    """
    if target == FROM_PYTHON:
        raise TargetError("this function was given from Python: only the program that gave it can continue the run")
    module_name, separator, attribute = target.partition(":")
    if not separator or not module_name or not attribute:
        raise TargetError(f"{target!r} is not of the form 'module:function'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise TargetError(f"no module {error.name!r}; searched: {_searched()}") from error
        message = f"module {module_name!r} needs {error.name!r}, which is not installed"
        raise MissingModuleError(message, str(error.name)) from error
    except BaseException as error:  # importing runs user code
        raise TargetError(f"importing {module_name!r} fails: {describe(error)}") from error
    function: Any = module
    for part in attribute.split("."):
        if not hasattr(function, part):
            origin = getattr(module, "__file__", None) or "built in"
            raise TargetError(f"module {module_name!r} ({origin}) has no {attribute!r}")
        function = getattr(function, part)
    return function


def _searched() -> str:
    """The user's folders of the import path; Python's own would not help the user."""
    standard = os.path.dirname(os.__file__)
    own = [
        repr(folder) for folder in sys.path
        if not folder.startswith(standard) and not folder.endswith(".zip") and "-packages" not in folder
    ]  # fmt: skip
    return ", ".join([*own, "installed packages"])


def load_function(target: str, names: Sequence[str]) -> Callable[..., Any]:
    """The function that `module:function` names, checked to take these arguments by position.

    Raises:
        TargetError: see `load_object`; or it cannot be called that way.
    """
    return hold_function(load_object(target), target, names)


def hold_function(function: Any, target: str, names: Sequence[str]) -> Callable[..., Any]:
    """Checks a function as `load_function` does. Args: target: its name in messages."""
    if not callable(function):
        raise TargetError(f"{target!r} is not a function but {type(function).__name__}")
    if is_async(function):
        raise TargetError(f"{target!r} is async; write a plain function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return function  # type: ignore[no-any-return]  # built in C without a signature: the first call will tell
    try:
        signature.bind(*names)
    except TypeError as error:
        raise TargetError(f"{target!r} cannot be called as ({', '.join(names)}): {error}") from error
    return function  # type: ignore[no-any-return]


def is_async(function: object) -> bool:
    """Whether calling it gives an awaitable, as far as that is visible from outside."""
    return any(
        inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each)
        for each in (function, getattr(function, "func", None), type(function).__dict__.get("__call__"))
    )


def describe(error: BaseException) -> str:
    """Type, message and a line of code, on one line: the last of the user's own before the error, or else of an
    installed package. What Orbit finds wrong with a returned value has none."""
    text = " ".join(str(error).split())[:300]
    # A syntax error names its own line; its frames are those of whoever imported it.
    frames = [] if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_borrowed(frame.filename)]
    installed = [frame for frame in frames if "-packages" in frame.filename]
    place = next((f" ({frame.filename}:{frame.lineno})" for frame in reversed(own or installed)), "")
    # Code of a user's sees only variables that are named, so what it misses may well be set.
    if _VARIABLE.search(text) or (frames and isinstance(error, KeyError) and frames[-1].filename == "<frozen os>"):
        place += "; code of yours gets the variables that spec.environment.variables names"
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def is_borrowed(file: str) -> bool:
    """Whether a file belongs to Python, an installed package or Orbit: a line in it tells a user little."""
    library = os.path.dirname(os.__file__)
    return file.startswith((library, os.path.join(PACKAGE_ROOT, "orbit_runtime"), "<")) or "-packages" in file


def check_elsewhere(target: str, names: Sequence[str], search_path: Sequence[str], variables: Iterable[str]) -> None:
    """Imports the function in a process that ends afterwards: no user code runs in this one.

    Args: variables: see `child_environment`.

    Raises:
        TargetError: see `load_function`; or the import does not end.
    """
    asked = json.dumps([target, list(names), import_path(search_path)])
    command = [sys.executable, "-m", __name__, asked]
    try:
        environment = child_environment(variables)
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        raise TargetError(f"importing {target!r} takes more than {CHECK_SECONDS:g} s") from None
    # The user's module may print as well.
    told = done.stdout.rpartition(_MARK)[2]
    if _MARK not in done.stdout:
        raise TargetError(f"importing {target!r} ends the process: {done.stderr.strip()[-300:] or done.returncode}")
    problem, missing = json.loads(told)
    if missing is not None:
        raise MissingModuleError(problem, missing)
    if problem is not None:
        raise TargetError(problem)


_MARK = "\n--- orbit: "


def _main(asked: str) -> None:
    target, names, path = json.loads(asked)
    sys.path[:] = list(dict.fromkeys(path))
    problem: str | None = None
    missing: str | None = None
    try:
        load_function(target, names)
    except TargetError as error:
        problem, missing = str(error), error.name if isinstance(error, MissingModuleError) else None
    print(f"{_MARK}{json.dumps([problem, missing])}", flush=True)


if __name__ == "__main__":
    _main(sys.argv[1])
