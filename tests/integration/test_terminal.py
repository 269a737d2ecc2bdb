"""`orbit run` in a real pseudo-terminal: what a user sees during the start and after Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.integration.killing import small_manifest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 300.0


class Screen:
    """A program in a terminal of its own, and all that it has written there."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        environ = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
        self.text = ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            # Tests that a shell started in the background inherit that Ctrl-C means nothing.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execve(sys.executable, [sys.executable, "-m", "orbit_runtime", *arguments], environ)

    def read_until(self, pattern: str) -> None:
        """Raises AssertionError where the program ends without showing it."""
        until = time.monotonic() + PATIENCE_SECONDS
        while not re.search(pattern, self.text):
            assert time.monotonic() < until, self.text
            assert self._read(), f"it ended without {pattern!r}:\n{self.text}"

    def press_ctrl_c(self) -> None:
        os.write(self._terminal, b"\x03")

    def wait(self) -> int:
        """Its exit code, once all it writes has been read."""
        while self._read():
            pass
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        os.close(self._terminal)
        if self.pid:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)

    def _read(self) -> bool:
        if not select.select([self._terminal], [], [], PATIENCE_SECONDS)[0]:
            return False
        try:
            data = os.read(self._terminal, 65536)
        except OSError:  # Linux's way to say that the other end is closed.
            return False
        self.text += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", data.decode(errors="replace"))
        return bool(data)


pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(small_manifest(steps=500)))
    made = Screen(["run", "run.yaml", "--out", "run"], tmp_path)
    yield made
    made.close()


def test_the_start_says_what_it_does_and_ctrl_c_is_answered_at_once(screen: Screen) -> None:
    for stage in ("importing torch", "loading the model", "starting the engine", "preflight"):
        screen.read_until(stage)
    # The bar's first frame may still name the last stage of the start; a busy machine may draw none between two steps.
    screen.read_until(r"step \d+/500 ─+ (?!preflight)\w+, ")
    screen.press_ctrl_c()
    screen.read_until(r"stopping: (finishing step \d+ \(\w+\) first|step \d+ is dropped)")
    assert screen.wait() == 75
    assert "stopped on request; the same command continues" in screen.text
    assert "Traceback" not in screen.text


def test_ctrl_c_during_the_start_is_answered_and_ends_it(screen: Screen) -> None:
    screen.read_until("importing torch")
    screen.press_ctrl_c()
    assert screen.wait() == 75
    assert "stopp" in screen.text
    assert "Traceback" not in screen.text
