"""A process that scores completions: `python -P -m orbit_runtime.workers.reward_worker CALLS_FD RESULTS_FD STACKS_FD
PARENT_PID`.

Belongs here: reading calls from one pipe, writing results to another. Does not belong here: timeouts and restarts,
which are the parent's (`reward_pool`), and heavy imports: a worker starts in some tens of milliseconds.

In:  4-byte length, JSON. First `{"path": [...], "rewards": [[name, target, arguments], ...]}`, then chunks of calls
     `[[name, completion, prompt, fields], ...]`.
Out: JSON lines. First `{"ready": true}` or `{"error": {"reward": ..., "message": ...}}`, then per chunk
     `{"taken": true}` (from there on time counts: an idle process may first have to be paged in), and per call
     `[outcome, value, reason, seconds]`, written before the next call starts, so that the parent knows which one hangs.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

from orbit_runtime.workers.confine import confine
from orbit_runtime.workers.entrypoints import TargetError
from orbit_runtime.workers.reward_function import call_reward, load_target
from orbit_runtime.workers.run_token import TOKEN_VARIABLE
from orbit_runtime.workers.stacks import tell_stacks

PR_SET_PDEATHSIG = 1


def main(calls_fd: int, results_fd: int, stacks_fd: int, parent_pid: int) -> int:
    """Serves until the parent closes the pipe."""
    end_with_parent(parent_pid)
    tell_stacks(stacks_fd)
    confine_rewards()
    for fd in (calls_fd, results_fd, stacks_fd):
        os.set_inheritable(fd, False)  # a subprocess of a reward must not keep the pipes open
    # What rewards print is not lost when the worker is killed.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    with open(calls_fd, "rb") as calls:
        head = read_message(calls)
        if head is None:
            return 0
        sys.path[:0] = [folder for folder in head["path"] if folder not in sys.path]
        functions: dict[str, Any] = {}
        for name, target, arguments in head["rewards"]:
            try:
                functions[name] = (load_target(target, arguments), arguments)
            except TargetError as error:
                _write(results_fd, {"error": {"reward": name, "message": str(error)}})
                return 1
        _write(results_fd, {"ready": True})
        while (chunk := read_message(calls)) is not None:
            _write(results_fd, {"taken": True})
            for name, completion, prompt, fields in chunk:
                function, arguments = functions[name]
                result = call_reward(function, arguments, completion, prompt, fields)
                _write(results_fd, [result.outcome, result.value, result.reason, result.seconds])
    return 0


def confine_rewards() -> None:
    """Keeps rewards, and what they start, from inspecting processes of run and engine, and from reading their token."""
    token = os.environ.pop(TOKEN_VARIABLE, None)
    # In a pod the seccomp profile forbids mounting in any case.
    confine(Path(token).parent if token else None, may_mount="ORBIT_ATTEMPT" not in os.environ)


def end_with_parent(parent_pid: int) -> None:
    """Makes this process die with its parent, also if the parent is killed, and also while a reward loops."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # it was gone before the request stood
        os._exit(0)


def read_message(stream: BinaryIO) -> Any:
    """The next message, or `None` at the end of the pipe."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    size = int.from_bytes(header, "big")
    body = stream.read(size)
    return json.loads(body) if len(body) == size else None


def _write(fd: int, message: Any) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(1.0)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in sys.argv[1:5])))
