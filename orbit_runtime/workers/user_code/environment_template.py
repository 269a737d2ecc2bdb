"""The process that environments are forked from: `python -P -m orbit_runtime.workers.user_code.environment_template`
with FD and PARENT_PID.

Belongs here: importing once, forking, and ending what was forked. Does not belong here: what a copy does
(`environment_cell`), which copies are needed (`environment_pool`).

In:  first a frame of JSON `{"path", "environment", "arguments", "tools", "limits", "key"}`, then commands of five
     bytes: `F` and four zeros, with a socket for the new process and a file for its stacks; `E` and the number of one
     to end.
Out: JSON lines, each marked (`Seal`). First `{"tools": [...], "cohorts": [...] or null}` or `{"error": ..., "target":
     ...}`, then `{"forked": pid}` and `{"ended": status}`, one for each command.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import os
import re
import signal
import socket
import sys
import types
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from orbit_runtime.workers.child.process import (
    Seal,
    adopt_orphans,
    dump_stacks_on_signal,
    guard,
    kill_group,
    read_frame,
)
from orbit_runtime.workers.user_code.confine import confine_user_code
from orbit_runtime.workers.user_code.entrypoints import TargetError, describe, load_object
from orbit_runtime.workers.user_code.environment_cell import LoadedEnvironment, serve
from orbit_runtime.workers.user_code.environment_protocol import EnvironmentLimits, check_environment

PLAIN: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Example|Examples):", re.MULTILINE)
_ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.+)$")
COMMAND = 5
MAX_ROLLOUTS = 1024
"""Rollouts of one episode."""


def tool_schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Schema of a function with annotated parameters, described by its docstring (Google style).

    Example: `def add(a: int, b: int = 0)` has the properties `a` and `b`, both integers, and `a` is required.
    """
    text = inspect.getdoc(function) or ""
    described = _described_arguments(text)
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # names that only a type checker knows
        hints = {}
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        about = {"description": described[parameter.name]} if parameter.name in described else {}
        properties[parameter.name] = {**_type_schema(hints.get(parameter.name)), **about}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    description = " ".join(_SECTION.split(text)[0].split())
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _type_schema(hint: Any) -> dict[str, Any]:
    """Schema of one annotation; an unknown one leaves the type open."""
    if hint in PLAIN:
        return {"type": PLAIN[hint]}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        given = [each for each in arguments if each is not type(None)]
        return _type_schema(given[0]) if len(given) == 1 else {"anyOf": [_type_schema(each) for each in given]}
    if origin in (list, tuple, set):
        return {"type": "array", **({"items": _type_schema(arguments[0])} if arguments else {})}
    return {"type": "object"} if origin is dict else {}


def _described_arguments(text: str) -> dict[str, str]:
    parts = re.split(r"^(?:Args|Arguments):\s*$", text, maxsplit=1, flags=re.MULTILINE)
    if len(parts) < 2:
        return {}
    lines = _SECTION.split(parts[1])[0].splitlines()
    return {found[1]: found[2].strip() for line in lines if (found := _ARGUMENT.match(line))}


def main(control_fd: int, parent_pid: int) -> int:
    """Serves until the parent closes the socket."""
    guard(parent_pid)
    confine_user_code()
    adopt_orphans()  # and ends them with itself
    os.set_inheritable(control_fd, False)
    control = socket.socket(fileno=control_fd)
    # Read without buffering, because the commands after it come with sockets.
    asked = read_frame(lambda size: control.recv(size, socket.MSG_WAITALL))
    if asked is None:
        return 0
    head = json.loads(asked)
    seal = Seal(head.pop("key"))

    def say(message: Any) -> None:
        control.sendall(seal.close(json.dumps(message).encode()) + b"\n")

    sys.path[:0] = [folder for folder in head["path"] if folder not in sys.path]
    try:
        loaded = _load(head)
    except TargetError as error:
        say({"error": error.args[0], "target": error.args[-1]})
        return 1
    limits = EnvironmentLimits(**head["limits"])
    schemas = [tool_schema(name, function) for name, function in loaded.tools.items()]
    say({"tools": schemas, "cohorts": loaded.cohorts})
    gc.freeze()  # collections in the copies leave shared pages alone
    cells: set[int] = set()
    # The parent may be gone before it reads an answer.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:
            command, given, _, _ = socket.recv_fds(control, COMMAND, 2)
            if len(command) < COMMAND:
                break
            if command[:1] == b"F":
                pid = _fork(control, given, loaded, limits)
                cells.add(pid)
                say({"forked": pid})
            else:
                pid = int.from_bytes(command[1:], "big")
                cells.discard(pid)
                say({"ended": _end(pid, cells)})
    for pid in list(cells):
        cells.discard(pid)
        _end(pid, cells)
    return 0


def _load(head: Any) -> LoadedEnvironment:
    """Raises TargetError with the message and the target."""
    target = head["environment"]
    try:
        environment = load_object(target) if target else None
        if environment is not None:
            check_environment(environment, target, head["arguments"])
        if hasattr(environment, "prepare"):
            _prepare(environment, head["arguments"])
        cohorts = _cohorts(environment)
        tools = {}
        for target in head["tools"]:
            function = load_object(target)
            if not callable(function):
                raise TargetError(f"{target!r} is not a function but {type(function).__name__}")
            tools[target.partition(":")[2].rpartition(".")[2]] = function
    except TargetError as error:
        raise TargetError(str(error), target) from error
    return LoadedEnvironment(environment, head["arguments"], tools, cohorts)


def _cohorts(environment: Any) -> tuple[str, ...] | None:
    """The name of each rollout of an episode, of an environment that asks the policy itself; None for any other."""
    if not hasattr(environment, "play"):
        return None
    if not inspect.iscoroutinefunction(environment.play):
        raise TargetError(f"{environment.__name__}.play is not `async`: it could ask nothing")
    rollouts: Any = getattr(environment, "rollouts", 1)
    if isinstance(rollouts, int) and not isinstance(rollouts, bool) and 1 <= rollouts <= MAX_ROLLOUTS:
        return ("",) * rollouts
    is_list = isinstance(rollouts, list | tuple) and all(isinstance(each, str) for each in rollouts)
    if not is_list or not 1 <= len(rollouts) <= MAX_ROLLOUTS:
        raise TargetError(
            f"{environment.__name__}.rollouts is {repr(rollouts)[:80]}: it is the number of rollouts of an episode, up "
            f"to {MAX_ROLLOUTS}, or a list with a name for each"
        )
    return tuple(rollouts)


def _prepare(environment: Any, arguments: Any) -> None:
    """Prepares what all copies share, before any are made."""
    try:
        environment.prepare(**arguments)
    except BaseException as error:  # user code
        raise TargetError(f"{environment.__name__}.prepare fails: {describe(error)}") from error


def _fork(control: socket.socket, given: list[int], loaded: LoadedEnvironment, limits: EnvironmentLimits) -> int:
    with warnings.catch_warnings():
        # A package that starts threads on import is forked without them. If a thread held a lock, the copy hangs, and
        # is ended like any other that hangs.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        for descriptor in given:
            os.close(descriptor)
        return pid
    status = 1
    try:
        control.close()
        connection, stacks = given
        dump_stacks_on_signal(stacks)
        serve(socket.socket(fileno=connection), loaded, limits, os.getppid())
        status = 0
    finally:
        os._exit(status)


def _end(pid: int, cells: set[int]) -> int:
    """Kills a copy's process group, and any child that left it; returns the copy's wait status."""
    try:
        # A copy that ended by itself has a status of its own; a signal afterwards would hide it.
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    kill_group(pid)
    if not ended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it may not have made its group yet
        _, status = os.waitpid(pid, 0)
    while strays := _children() - cells:
        for stray in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(stray, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(stray, 0)
    return status


def _children() -> set[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return {int(pid) for pid in path.read_text().split()} if path.exists() else set()


if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in sys.argv[1:3])))
