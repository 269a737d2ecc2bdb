"""The process environments are forked from: `python -P -m orbit_runtime.workers.environment_template FD PARENT_PID`.

Belongs here: importing once, forking, and ending what was forked. Does not belong here: what a copy does
(`environment_cell`), which copies are needed (`environment_pool`).

In:  first 4-byte length and JSON `{"path", "environment", "arguments", "tools", "limits"}`, then commands of five
     bytes: `F` and four zeros, with a socket for the new process and a file for its stacks; `E` and the number of one
     to end.
Out: JSON lines. First `{"tools": [...], "cohorts": [...] or null}` or `{"error": ..., "target": ...}`, then
     `{"forked": pid}` and `{"ended": status}`, one for each command.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import inspect
import json
import os
import signal
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

from orbit_runtime.workers.entrypoints import TargetError, describe, load_object
from orbit_runtime.workers.environment_cell import Loaded, serve
from orbit_runtime.workers.environment_checks import check_environment
from orbit_runtime.workers.environment_protocol import EnvironmentLimits
from orbit_runtime.workers.reward_worker import confine_rewards, end_with_parent
from orbit_runtime.workers.stacks import tell_stacks
from orbit_runtime.workers.tool_schema import tool_schema

COMMAND = 5
MAX_ROLLOUTS = 1024
"""Rollouts of one episode."""
PR_SET_CHILD_SUBREAPER = 36


def main(control_fd: int, parent_pid: int) -> int:
    """Serves until the parent closes the socket."""
    end_with_parent(parent_pid)
    confine_rewards()
    if sys.platform == "linux":
        # Whatever an environment leaves behind becomes this process's child, and is ended with it.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(control_fd, False)
    control = socket.socket(fileno=control_fd)
    # Read without buffering, because the commands after it come with sockets.
    size = int.from_bytes(control.recv(4, socket.MSG_WAITALL), "big")
    head = json.loads(control.recv(size, socket.MSG_WAITALL) or b"null")
    if head is None:
        return 0
    sys.path[:0] = [folder for folder in head["path"] if folder not in sys.path]
    try:
        loaded = _load(head)
    except TargetError as error:
        _say(control, {"error": error.args[0], "target": error.args[-1]})
        return 1
    limits = EnvironmentLimits(**head["limits"])
    schemas = [tool_schema(name, function) for name, function in loaded.tools.items()]
    _say(control, {"tools": schemas, "cohorts": loaded.cohorts})
    gc.freeze()  # collections in the copies leave shared pages alone
    cells: set[int] = set()
    while True:
        command, given, _, _ = socket.recv_fds(control, COMMAND, 2)
        if len(command) < COMMAND:
            break
        if command[:1] == b"F":
            pid = _fork(control, given, loaded, limits)
            cells.add(pid)
            _say(control, {"forked": pid})
        else:
            pid = int.from_bytes(command[1:], "big")
            cells.discard(pid)
            _say(control, {"ended": _end(pid, cells)})
    for pid in list(cells):
        cells.discard(pid)
        _end(pid, cells)
    return 0


def _load(head: Any) -> Loaded:
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
    return Loaded(environment, head["arguments"], tools, cohorts)


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


def _fork(control: socket.socket, given: list[int], loaded: Loaded, limits: EnvironmentLimits) -> int:
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
        tell_stacks(stacks)
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
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
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


def _say(control: socket.socket, message: Any) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in sys.argv[1:3])))
