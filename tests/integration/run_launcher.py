"""Starts runs that can be killed: imports once, then forks a child per run, so that a life costs no import.

Run as a program. Each line on stdin is a JSON object `{"manifest": {...}, "out": "...", "environment": {...}}`; the
answer is the child's pid, and when it ended, its exit code. With `{"command": [...]}` a child carries out that command
of `orbit`; its end is asked for by `{"ended": pid}`. Questions are numbered, and so are their answers: one that comes
when nobody waits for it any more, because its test ran out of time, is no answer to the next. The parent never
computes, so the children fork from a process without threads.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from orbit_runtime.workers.child.process import STACK_SECONDS, STACK_SIGNAL, descendants, dump_stacks_on_signal


class RunLauncher:
    """The test's side of the program."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, **(environment or {})},
        )
        self._asked = 0
        assert self._read() == {"ready": True, "number": 0}

    def start(self, manifest: dict[str, Any], out: str, environment: dict[str, str] | None = None) -> int:
        """Pid of a run that has just started, with these variables on top of the launcher's."""
        self._write({"manifest": manifest, "out": out, "environment": environment or {}})
        return int(self._read()["pid"])

    def wait(self) -> int:
        """Exit code of the run, negative where a signal ended it."""
        return int(self._read()["code"])

    def command(self, *arguments: str, environment: dict[str, str] | None = None) -> int:
        """Pid of `orbit ARGUMENTS`, which goes on beside others."""
        self._write({"command": arguments, "environment": environment or {}})
        return int(self._read()["pid"])

    def ended(self, pid: int) -> int | None:
        """Exit code of a command, negative where a signal ended it; None: it goes on."""
        self._write({"ended": pid})
        code = self._read()["code"]
        return None if code is None else int(code)

    def dump_stacks_on_signal(self, pid: int) -> None:
        """Has a child that should have ended write the stacks of its threads to stderr, for who looks for the cause."""
        os.kill(pid, STACK_SIGNAL)
        time.sleep(STACK_SECONDS)

    def run(self, manifest: dict[str, Any], out: str, environment: dict[str, str] | None = None) -> int:
        self.start(manifest, out, environment)
        return self.wait()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            # It waits for a run whose test has failed.
            for pid in (*descendants(self._process.pid), self._process.pid):
                os.kill(pid, signal.SIGKILL)
            self._process.wait()

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._asked += 1
        self._process.stdin.write(json.dumps({**message, "number": self._asked}) + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            answer = dict(json.loads(line))
            if answer["number"] == self._asked:
                return answer
        raise AssertionError("the launcher died")


def _life(manifest: dict[str, Any], out: str) -> int:
    from orbit_runtime.errors import OrbitError
    from orbit_runtime.loop import run
    from orbit_runtime.observability.progress import SilentProgress
    from orbit_runtime.spec import OrbitRun

    try:
        result = run(OrbitRun.model_validate(manifest), out=out, progress=SilentProgress())
    except OrbitError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    return 75 if result.ended == "stopped" else 0


def main() -> None:
    import transformers  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

    import orbit_runtime.loop
    import orbit_runtime.policy.load
    import orbit_runtime.rollout.torch_engine
    import orbit_runtime.services.calls
    import orbit_runtime.services.orchestrate
    import orbit_runtime.training.torch_trainer  # noqa: F401
    from orbit_runtime.cli.main import run_command

    # Children inherit it.
    dump_stacks_on_signal(2)
    answer = os.dup(1)
    os.dup2(2, 1)
    os.write(answer, b'{"ready": true, "number": 0}\n')
    for line in sys.stdin:
        message = json.loads(line)
        number = message["number"]
        if "ended" in message:
            pid, status = os.waitpid(message["ended"], os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if pid else None
            os.write(answer, json.dumps({"code": code, "number": number}).encode() + b"\n")
            continue
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                os.environ.update(message["environment"])
                if "command" in message:
                    code = run_command(message["command"])
                else:
                    code = _life(message["manifest"], message["out"])
            except Exception:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.write(answer, json.dumps({"pid": pid, "number": number}).encode() + b"\n")
        if "command" in message:
            continue
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        os.write(answer, json.dumps({"code": code, "number": number}).encode() + b"\n")


if __name__ == "__main__":
    main()
