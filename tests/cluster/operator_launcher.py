"""Starts operators: imports once, then forks a child for each, so that a start costs no import.

Run as a program. Each line on stdin is a JSON object: `{"log": "...", "environment": {...}, "crashing": false}` starts
an operator with exactly that environment and answers its pid; `{"pid": 7}` answers its exit code, or null while it
lives. Operators end with this program, and this program with whoever started it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


class Forked:
    """An operator, as `subprocess.Popen` would show it."""

    def __init__(self, log: Path, environment: Mapping[str, str], *, crashing: bool) -> None:
        self._launcher = launcher()
        self.returncode: int | None = None
        asked = {"log": str(log), "environment": dict(environment), "crashing": crashing}
        self.pid = int(self._launcher.ask(asked)["pid"])

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._launcher.ask({"pid": self.pid})["code"]
        return self.returncode

    def wait(self, seconds: float = 30.0) -> int:
        """Raises subprocess.TimeoutExpired."""
        until = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("orbit_operator", seconds)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Launcher:
    """The tests' side of the program; any thread may ask."""

    def __init__(self) -> None:
        from cluster.bed.processes import WITH_ITS_PARENT
        from cluster.by_hand import ROOT

        paths = (ROOT / "operator", ROOT, ROOT / "tests")
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [*WITH_ITS_PARENT, sys.executable, __file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        )  # fmt: skip

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        assert line, "the launcher of operators died"
        return dict(json.loads(line))


@cache
def launcher() -> _Launcher:
    """One for all operators of these tests. Made by the main thread: what it starts ends with that thread."""
    assert threading.current_thread() is threading.main_thread()
    return _Launcher()


def _live(question: Mapping[str, Any]) -> int:
    """In the child: the operator, as `python -m orbit_operator` would run it, or the one of `crashing_operator`."""
    from kubernetes.aio.config import kube_config

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != question["parent"]:
        return 1  # The launcher ended before the kernel was told.
    with open(question["log"], "ab") as log, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.clear()
    os.environ.update(question["environment"])
    # The client library reads this variable when it is imported.
    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = os.environ["KUBECONFIG"]
    sys.argv = ["orbit_operator"]
    try:
        if question["crashing"]:
            from cluster.crashing_operator import main as live
        else:
            from orbit_operator.main import main as live
        live()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def main() -> None:
    import cluster.crashing_operator  # noqa: F401  It imports the operator.

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the tests, which then end operators in order.
    assert threading.active_count() == 1, "a process with threads must not fork"
    gc.freeze()
    ended: dict[int, int] = {}
    for line in sys.stdin:
        question = json.loads(line) | {"parent": os.getpid()}
        if "log" in question:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = _live(question)
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            answer: dict[str, Any] = {"pid": pid}
        else:
            pid = question["pid"]
            found, status = (0, 0) if pid in ended else os.waitpid(pid, os.WNOHANG)
            if found:
                ended[pid] = os.waitstatus_to_exitcode(status)
            answer = {"code": ended.get(pid)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
