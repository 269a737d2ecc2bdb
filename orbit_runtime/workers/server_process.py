"""A server in a process of its own: start, wait until it answers, watch, stop with all its children.

Belongs here: processes and their logs. Does not belong here: which command (`rollout.sglang_server`) or what is asked
of the server (`rollout.sglang_api`).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from orbit_runtime.errors import EngineDiedError
from orbit_runtime.workers.run_token import PIPE_VARIABLE, token_pipe

TAIL_LINES = 20
LONGEST_LINE = 300
STOP_SECONDS = 20.0


class WatchedServer(ABC):
    """A server that was started somewhere, and whose log can be read here."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log

    @abstractmethod
    def exit_status(self) -> int | None:
        """None while it lives; negative: the signal that killed it."""

    @abstractmethod
    def resident_bytes(self) -> int | None:
        """Of all its processes; None where that is not known."""

    @abstractmethod
    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Asks all its processes to end, then ends them. Safe to call twice."""

    def wait_until(self, ready: Callable[[], bool], *, seconds: float) -> None:
        """Raises EngineDiedError (82) with the log's end where the process dies or is not ready in time."""
        until = time.monotonic() + seconds
        while not ready():
            status = self.exit_status()
            if status is not None:
                said = self._lines()[-1:]
                last = f": {said[0][:LONGEST_LINE]}" if said else ""
                raise EngineDiedError(
                    f"{self.name} {_ended(status)} while it started{last}", where=str(self.log), fix=self.tail()
                )
            if time.monotonic() > until:
                raise EngineDiedError(
                    f"{self.name} did not answer within {seconds:.0f} s", where=str(self.log), fix=self.tail()
                )
            time.sleep(0.2)

    def tail(self) -> str:
        """The last lines of the log, for an error's message."""
        return "read the end of its log:\n" + "\n".join(self._lines())

    def _lines(self) -> list[str]:
        try:
            return [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()][-TAIL_LINES:]
        except OSError as error:
            return [f"it cannot be read: {error}"]


class ServerProcess(WatchedServer):
    """One server. Its process group is its own, so that stopping it stops what it started."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        token: str | None = None,
    ) -> None:
        """Args: token: what it must be asked with; it gets it by a pipe, not by arguments or environment."""
        super().__init__(name, log)
        log.parent.mkdir(parents=True, exist_ok=True)
        own, pipes = dict(environment), []
        if token is not None:
            pipes.append(token_pipe(token))
            own[PIPE_VARIABLE] = str(pipes[0])
        try:
            with log.open("ab") as out:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=own, start_new_session=True,
                    pass_fds=pipes,
                )  # fmt: skip
        finally:
            for pipe in pipes:
                os.close(pipe)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_status(self) -> int | None:
        return self._process.poll()

    def resident_bytes(self) -> int | None:
        """Of the whole group; None where the system has no /proc."""
        found = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            # proc(5): the third field after the name is the group, the twenty-second the resident pages.
            if int(fields[2]) == self.pid:
                found += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        return found or None

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Asks the whole group to end, then ends it. Safe to call twice."""
        for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, seconds)):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            try:
                self._process.wait(patience)
                # The leader may be gone before its children.
                os.killpg(self._process.pid, signal.SIGKILL)
            except subprocess.TimeoutExpired:
                continue
            except ProcessLookupError:
                break
        self._process.poll()


def free_port() -> int:
    """A port of the loopback device that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _ended(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
