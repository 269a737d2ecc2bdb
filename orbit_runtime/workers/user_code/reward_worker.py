"""A process that scores completions: `python -P -m orbit_runtime.workers.user_code.reward_worker` with CALLS_FD,
RESULTS_FD, STACKS_FD and PARENT_PID.

In:  frames of JSON. First `{"path": [...], "rewards": [[name, target, arguments], ...], "key": ...}`, then chunks of
     calls `[[name, completion, prompt, fields], ...]`.
Out: JSON lines, each marked (`Seal`). First `{"ready": true}` or `{"error": {"reward": ..., "message": ...}}`, then
     per chunk `{"taken": true}` (from there on time counts: an idle process may first have to be paged in), and per
     call `[outcome, value, reason, seconds]`, written before the next call starts, so that the parent knows which one
     hangs.
"""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any

from orbit_runtime.workers.child.process import Seal, dump_stacks_on_signal, guard, read_frame, write_all
from orbit_runtime.workers.user_code.confine import confine_user_code
from orbit_runtime.workers.user_code.entrypoints import TargetError
from orbit_runtime.workers.user_code.reward_protocol import call_reward, load_target


def main(calls_fd: int, results_fd: int, stacks_fd: int, parent_pid: int) -> int:
    """Serves until the parent closes the pipe."""
    guard(parent_pid)
    dump_stacks_on_signal(stacks_fd)
    confine_user_code()
    for fd in (calls_fd, results_fd, stacks_fd):
        os.set_inheritable(fd, False)  # a subprocess of a reward must not keep the pipes open
    # What rewards print is not lost when the worker is killed.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    with open(calls_fd, "rb") as calls:
        asked = read_frame(calls.read)
        if asked is None:
            return 0
        head = json.loads(asked)
        seal = Seal(head.pop("key"))

        def write(message: Any) -> None:
            write_all(results_fd, seal.close(json.dumps(message).encode()) + b"\n")

        sys.path[:0] = [folder for folder in head["path"] if folder not in sys.path]
        functions: dict[str, Any] = {}
        for name, target, arguments in head["rewards"]:
            try:
                functions[name] = (load_target(target, arguments), arguments)
            except TargetError as error:
                write({"error": {"reward": name, "message": str(error)}})
                return 1
        write({"ready": True})
        while (chunk := read_frame(calls.read)) is not None:
            write({"taken": True})
            for name, completion, prompt, fields in json.loads(chunk):
                function, arguments = functions[name]
                result = call_reward(function, arguments, completion, prompt, fields)
                write([result.outcome, result.value, result.reason, result.seconds])
    return 0


if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in sys.argv[1:5])))
