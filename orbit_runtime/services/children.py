"""Trainer and inference as children of `orbit rl`: started with it, restarted if they die, ended with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from orbit_runtime import errors
from orbit_runtime.errors import EngineDiedError, OrbitError
from orbit_runtime.workers.child.run_token import new_token, token_pipe
from orbit_runtime.workers.system import HeldPort

MOST_STARTS = 20
END_SECONDS = 30.0
"""Seconds in which an inference process may end its servers before they are killed."""
SHOWN_LINES = 12
ERROR = "error: "


class Children:
    """Context manager: the children run within it, and none is left after it."""

    def __init__(self, kinds: Sequence[str], file: Path, overrides: Sequence[str], note: Callable[[str], None]) -> None:
        """Args: kinds: `trainer`, `inference`."""
        self.token = new_token()
        self._file = file
        self._overrides = overrides
        self._note = note
        self._ports = {kind: HeldPort() for kind in kinds}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._starts = 0

    def __enter__(self) -> Children:
        self._scratch = TemporaryDirectory(prefix="orbit-rl-")
        for kind in self._ports:
            self._start(kind)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for process in self._processes.values():
                process.terminate()
            for process in self._processes.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)
        finally:
            # If the user interrupts the wait above, no child is left either.
            for process in self._processes.values():
                process.kill()
                process.wait()
                if process.stdin is not None:
                    process.stdin.close()
            for port in self._ports.values():
                port.close()
            self._scratch.cleanup()

    @property
    def addresses(self) -> dict[str, str]:
        return {kind: f"http://127.0.0.1:{port.number}" for kind, port in self._ports.items()}

    def pid(self, kind: str) -> int:
        return self._processes[kind].pid

    def check(self) -> None:
        """Restarts processes that were ended by a signal, ran out of memory or failed by themselves.

        Raises:
            OrbitError: one ended with an error for the user, with its exit code; or they end again and again (82).
        """
        for kind, process in list(self._processes.items()):
            code = process.poll()
            if code is None:
                continue
            said, error = self._said(kind)
            if code > 0 and code != errors.OutOfMemoryError.exit_code and _error_of(code).who_acts == "user":
                raise _error_of(code)(f"the {kind} process ended: {said}")
            if self._starts >= MOST_STARTS:
                raise EngineDiedError(f"the {kind} process ended again and again, at last with {code}: {said}")
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            self._note(f"the {kind} process ended {how}{f': {error}' if error else ''}; starting it again")
            self._start(kind)

    def _start(self, kind: str) -> None:
        self._starts += 1
        # A reward that may read other processes' environments finds no token there.
        token = token_pipe(self.token)
        command = [
            sys.executable, "-P", "-m", "orbit_runtime.cli.main", kind, str(self._file),
            "--listen", f"127.0.0.1:{self._ports[kind].number}", "--end-with-input",
            "--token-file", f"/dev/fd/{token}",
            *(part for each in self._overrides for part in ("--set", each)),
        ]  # fmt: skip
        try:
            with self._log(kind).open("wb") as log:
                self._processes[kind] = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    pass_fds=(token,),
                    # Ctrl-C of a terminal is for the orchestrator, which ends them once its step is kept.
                    start_new_session=True,
                )
        finally:
            os.close(token)

    def _log(self, kind: str) -> Path:
        return Path(self._scratch.name) / f"{kind}.log"

    def _said(self, kind: str) -> tuple[str, str]:
        """The end of what it wrote, and of that the line that names its error, if there is one."""
        lines = self._log(kind).read_text(errors="replace").strip().splitlines()
        errors_at = [index for index, line in enumerate(lines) if line.startswith(ERROR)]
        if errors_at:
            lines = lines[errors_at[-1] :]
            error = lines[0].removeprefix(ERROR)
            return "\n".join([error, *lines[1:SHOWN_LINES]]), error
        return "\n".join(lines[-SHOWN_LINES:]) or "it said nothing", ""


def _error_of(code: int) -> type[OrbitError]:
    known = (kind for kind in OrbitError.__subclasses__() if kind.exit_code == code)
    return next(known, EngineDiedError)
