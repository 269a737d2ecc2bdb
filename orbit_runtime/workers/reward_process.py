"""One reward worker from its parent's side: start, pipes, calls in flight, end.

Belongs here: the handle of one process. Does not belong here: which call goes to which worker, or what its death means
(`reward_pool`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orbit_runtime.workers.run_token import SERVE_VARIABLE, SERVICE_VARIABLE
from orbit_runtime.workers.stacks import Stacks

PACKAGE_ROOT = str(Path(__file__).parents[2])
READ_SIZE = 1 << 16
WORKER_MODULE = "orbit_runtime.workers.reward_worker"


class RewardProcess:
    """Starts at once. The parent's pipe ends are non-blocking, and apart from ending, no method waits.

    Args:
        output_fd: takes what the worker, and what it starts, prints.
    """

    def __init__(self, head: Mapping[str, Any], *, now: float, output_fd: int) -> None:
        calls_read, self.calls_fd = os.pipe()
        self.results_fd, results_write = os.pipe()
        self._stacks = Stacks()
        theirs = (calls_read, results_write, self._stacks.fd)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", WORKER_MODULE, *map(str, theirs), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output_fd,
                stderr=output_fd,
                pass_fds=theirs,
                env=child_environment(),
                start_new_session=True,  # its own group: killed whole, and Ctrl-C of the terminal does not reach it
            )
        finally:
            os.close(calls_read)
            os.close(results_write)
        os.set_blocking(self.calls_fd, False)
        os.set_blocking(self.results_fd, False)
        self._inbox = b""
        self._outbox = bytearray()
        self._is_closed = False
        self.is_ready = False
        self.in_flight: deque[Any] = deque()
        """The pool's identifiers of calls sent and not answered; the first one is running."""
        self.has_taken = False
        """Whether it confirmed the last chunk sent."""
        self.progress_at = now
        """When the running call started, as far as the parent can tell."""
        self.send(head)

    @property
    def is_idle(self) -> bool:
        return self.is_ready and not self.in_flight

    @property
    def wants_write(self) -> bool:
        return bool(self._outbox)

    def send(self, message: Any) -> None:
        body = json.dumps(message).encode()
        self._outbox += len(body).to_bytes(4, "big") + body
        self.flush()

    def flush(self) -> None:
        """Writes as much as the pipe takes. A closed pipe is detected by `receive`."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._outbox:
                del self._outbox[: os.write(self.calls_fd, self._outbox)]

    def receive(self) -> tuple[list[Any], bool]:
        """Complete messages that arrived, and whether the worker still holds its end open."""
        is_open = True
        while True:
            try:
                data = os.read(self.results_fd, READ_SIZE)
            except BlockingIOError:
                break
            if not data:
                is_open = False
                break
            self._inbox += data
        *lines, self._inbox = self._inbox.split(b"\n")
        return [json.loads(line) for line in lines], is_open

    def stack(self) -> str:
        """The worker's stacks, taken before it is ended."""
        return self._stacks.ask(self._process.pid)

    def end(self) -> str:
        """Kills the worker's process group, if it still lives, and returns how the worker ended. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            os.close(self.calls_fd)
            os.close(self.results_fd)
            self._stacks.close()
        code = self._process.wait()
        return f"the worker was ended by {signal.Signals(-code).name}" if code < 0 else f"the worker exited with {code}"

    def exit_reason(self) -> str:
        """How a worker that closed its pipe ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)  # before `end`, whose signal would hide the true cause
        return self.end()


def head_message(rewards: Sequence[tuple[str, str, Mapping[str, Any]]], search_path: Sequence[str]) -> dict[str, Any]:
    """The first message: where to import from (including the parent's own path) and what to load."""
    return {
        "path": search_path_of(search_path),
        "rewards": [[name, target, dict(arguments)] for name, target, arguments in rewards],
    }


def search_path_of(folders: Sequence[str]) -> list[str]:
    """These folders, followed by this process's import path."""
    return list(dict.fromkeys([*folders, *(folder or os.getcwd() for folder in sys.path)]))


def child_environment() -> dict[str, str]:
    """The environment of a process that runs a user's code: the parent's without the tokens of its ports, with Orbit
    importable and without a thread pool in every worker."""
    inherited = os.environ.get("PYTHONPATH")
    return {
        "OMP_NUM_THREADS": "1",
        **{name: value for name, value in os.environ.items() if name not in (SERVE_VARIABLE, SERVICE_VARIABLE)},
        "PYTHONPATH": os.pathsep.join([*([inherited] if inherited else []), PACKAGE_ROOT]),
    }
