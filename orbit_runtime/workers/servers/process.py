"""A server in a process of its own: its command, start, wait until it responds, watch, stop with all its children.

Belongs here: what is the same wherever an SGLang server with Orbit's plug-in is started, here or by the agent of
another container; processes and their logs. Does not belong here: which arguments follow from a run
(`rollout.sglang_server`), requests to the server (`rollout.sglang_api`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from orbit_runtime.errors import EngineDiedError, OrbitError, OutOfMemoryError, UnsupportedError, says_no_memory
from orbit_runtime.workers.child.process import PACKAGE_ROOT, describe_exit
from orbit_runtime.workers.child.run_token import PIPE_VARIABLE, token_pipe
from orbit_runtime.workers.system import memory_kills

PYTHON_VARIABLE = "ORBIT_SGLANG_PYTHON"
"""Interpreter of the environment that SGLang is installed in; default: this process's own."""
PARENT_VARIABLE = "ORBIT_SGLANG_PARENT"
"""Process that a server ends with."""
AGENT_VARIABLE = "ORBIT_ENGINE_URL"
"""Address of the agent in the engine's container (`agent`). If unset, servers are child processes."""
MODULE = "orbit_runtime.sglang_plugin.launch"
INSTALL = (
    "install SGLang beside Orbit (pip install 'orbit-rl[sglang]'), or name the interpreter of an environment that has "
    "it in ORBIT_SGLANG_PYTHON; on a cluster the image is the chart's runs.engineImage or placement.image"
)
"""The fix if SGLang is not installed."""
PINNED_SGLANG = "0.5.23"
"""The version whose source Orbit's plug-in was written against. A hook can fit another one and mean something else."""
VERSION_VARIABLE = "ORBIT_SGLANG_VERSION"
"""`Any`: servers start with any version (`rollout.engineVersion`)."""
TAIL_LINES = 20
LONGEST_LINE = 300
STOP_SECONDS = 20.0
LOG_SECONDS = 1.0
"""Between two looks into the log of a server that is starting."""


def check_version(found: str, *, name: str) -> None:
    """Raises UnsupportedError (78), with both versions, if `found` is not the pinned one.

    Args:
        name: name of the server that runs it.
    """
    if found != PINNED_SGLANG:
        raise UnsupportedError(
            f"{name} runs SGLang {found} with Orbit's plug-in, which is made for SGLang {PINNED_SGLANG}",
            where="spec.rollout.engineVersion",
            fix=f"install sglang=={PINNED_SGLANG}; `engineVersion: Any` goes on with another version, in which nothing "
            "was tested",
        )


def launch_command(arguments: Sequence[str]) -> list[str]:
    return [os.environ.get(PYTHON_VARIABLE) or sys.executable, "-m", MODULE, *arguments]


def launch_environment(own: Mapping[str, str]) -> dict[str, str]:
    """This process's environment and the server's own variables. The server ends with this process."""
    path = os.pathsep.join(filter(None, (PACKAGE_ROOT, os.environ.get("PYTHONPATH", ""))))
    fixed = {PARENT_VARIABLE: str(os.getpid()), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own, **fixed}


class PortTakenError(EngineDiedError):
    """Another process has the port on which the server was to listen."""


class WatchedServer(ABC):
    """A server that was started anywhere, with a log that can be read here."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._kills = memory_kills()

    @abstractmethod
    def exit_status(self) -> int | None:
        """None while it runs; negative if a signal killed it."""

    @abstractmethod
    def resident_bytes(self) -> int | None:
        """Memory of all its processes; None if unknown."""

    @abstractmethod
    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Asks all its processes to end, then ends them. Safe to call twice."""

    def wait_until(self, ready: Callable[[], bool], *, seconds: float, port: int | None = None) -> None:
        """Waits until it is ready, as long as its log grows: reading 1 TB of weights alone takes minutes.

        Args:
            seconds: the longest time without a new line.
            port: the port it was told to listen on. SGLang whose port is taken neither listens nor ends.

        Raises:
            PortTakenError: (82) its log says that another process has its port.
            UnsupportedError: (78) the process refused to start, with the message of its last line.
            OutOfMemoryError: (79) the process died because its memory, or its device's, ran out.
            EngineDiedError: (82) it died of another cause, or was silent for too long; with the end of the log.
        """
        until, size = time.monotonic() + seconds, self._log_size()
        looked = time.monotonic()
        while not ready():
            if (grown := self._log_size()) != size:
                until, size = time.monotonic() + seconds, grown
            if port is not None and time.monotonic() - looked >= LOG_SECONDS:
                self._check_port(port)
                looked = time.monotonic()
            status = self.exit_status()
            if status is not None:
                raise self._death(status)
            if time.monotonic() > until:
                raise EngineDiedError(
                    f"{self.name} did not answer, and wrote nothing to its log for {seconds:.0f} s",
                    where=str(self.log),
                    fix=self.tail(),
                )
            time.sleep(0.2)

    def _check_port(self, port: int) -> None:
        for line in self._lines():
            # By its number, because the log may hold the end of an earlier start, on another port.
            if str(port) in line and "address already in use" in line.lower():
                raise PortTakenError(
                    f"{self.name} cannot listen on port {port}: another process has it",
                    where=str(self.log),
                    fix="start again: each start chooses a free port",
                )

    def _death(self, status: int) -> OrbitError:
        lines = self._lines()
        if status == UnsupportedError.exit_code and (refusal := _refusal(lines)):
            return refusal
        about_memory = [line for line in lines if says_no_memory(line)]
        last = f": {(about_memory or lines)[-1][:LONGEST_LINE]}" if lines else ""
        said = f"{self.name} {describe_exit(status, 'was killed by', 'ended with')} while it started{last}"
        if about_memory:
            fix = "a shorter model.maxSequenceLength, fewer rollout.maxRunningRequests, or a GPU with more memory"
            return OutOfMemoryError(said, where=str(self.log), fix=f"{fix}; {self.tail()}")
        if status == -signal.SIGKILL and memory_kills() > self._kills:
            fix = "give it more main memory (placement.resources.memory)"
            return OutOfMemoryError(f"{said}; the kernel ended it for its memory", where=str(self.log), fix=fix)
        return EngineDiedError(said, where=str(self.log), fix=self.tail())

    def tail(self) -> str:
        """The last lines of the log, for an error message."""
        return "read the end of its log:\n" + "\n".join(self._lines())

    def _log_size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def _lines(self) -> list[str]:
        try:
            return [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()][-TAIL_LINES:]
        except OSError as error:
            return [f"it cannot be read: {error}"]


class ServerProcess(WatchedServer):
    """One server in its own process group, so that stopping it also stops what it started."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        token: str | None = None,
    ) -> None:
        """
        Args:
            token: token that requests must carry; passed through a pipe, not by arguments or environment.

        Raises:
            UnsupportedError: (78) the program does not exist.
        """
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
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            if error.filename != command[0]:
                raise
            raise UnsupportedError(
                f"{name} cannot be started: {command[0]}: {error.strerror}", where=PYTHON_VARIABLE, fix=INSTALL
            ) from None
        finally:
            for pipe in pipes:
                os.close(pipe)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_status(self) -> int | None:
        return self._process.poll()

    def resident_bytes(self) -> int | None:
        """Memory of the whole process group; None if the system has no /proc."""
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
                # The leader may end before its children.
                os.killpg(self._process.pid, signal.SIGKILL)
            except subprocess.TimeoutExpired:
                continue
            except ProcessLookupError:
                break
        self._process.poll()


def _refusal(lines: Sequence[str]) -> UnsupportedError | None:
    """A server's last log line as the error that it cannot run here (`OrbitError.to_json`); None if it is not one."""
    try:
        told = json.loads(lines[-1])
        return UnsupportedError(told["message"], where=told["where"], fix=told["fix"])
    except (IndexError, ValueError, TypeError, KeyError):
        return None
