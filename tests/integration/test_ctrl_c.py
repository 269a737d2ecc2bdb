"""Ctrl-C at every moment of a run: a sentence, 75, no traceback, and a folder that continues to the same adapter."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from orbit_runtime.storage import open_store
from tests.integration.killing import small_manifest, timeless_rows

ROOT = Path(__file__).resolve().parents[2]
STEPS = 24
PATIENCE_SECONDS = 300.0
MOMENTS: list[tuple[str | None, float]] = [
    (None, 0.3),
    (None, 0.6),
    ("start: checking the plan", 0.0),
    ("start: importing the loop", 0.0),
    ("start: importing the loop", 0.3),
    ("start: reading prompts", 0.0),
    ("start: starting rewards", 0.0),
    ("start: importing torch", 0.0),
    ("start: importing torch", 0.7),
    ("start: fetching the model", 0.0),
    ("start: loading the model", 0.0),
    ("start: starting the engine", 0.0),
    ("start: preflight", 0.0),
    ("start: preflight", 0.2),
    (r"step \d+/", 0.0),
    (r"step \d+/", 0.05),
    (r"step \d+/", 0.1),
    (r"step \d+/", 0.17),
    (r"step \d+/", 0.25),
]
"""What is waited for in what the command says, and seconds after that; None: its start."""


class Command:
    """`orbit ARGUMENTS`, whose Ctrl-C is the terminal's own: a SIGINT to the process that the user started."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.said = ""
        self._heard = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "orbit_runtime", *arguments],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, bufsize=1,
            # A shell started in the background lets its children inherit that Ctrl-C means nothing.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._heard:
                self.said += line
                self._heard.notify_all()

    def wait_for(self, pattern: str) -> None:
        with self._heard:
            found = self._heard.wait_for(lambda: re.search(pattern, self.said), PATIENCE_SECONDS)
        assert found, self.said

    def press_ctrl_c(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Its exit code."""
        try:
            code = self._process.wait(PATIENCE_SECONDS)
        finally:
            self._process.kill()
            self._thread.join()
        return code


def run(folder: Path, out: str) -> Command:
    return Command(folder, "run", "run.yaml", "--out", out)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_ctrl_c_at_any_moment_is_answered_and_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(small_manifest(steps=STEPS)))
    assert run(tmp_path, "alone").end() == 0
    wrong: list[str] = []
    for moment, seconds in MOMENTS:
        command = run(tmp_path, "stopped")
        if moment is not None:
            command.wait_for(moment)
        time.sleep(seconds)
        command.press_ctrl_c()
        code = command.end()
        if moment is None and "init_import_site" in command.said:
            continue  # The interpreter itself was not up yet: no line of ours can answer.
        if code != 75 or "Traceback" in command.said or not re.search("stopp|starts again", command.said):
            wrong.append(f"{moment} + {seconds} s: {code}\n{command.said}")
    assert not wrong, "\n".join(wrong)
    last = run(tmp_path, "stopped")
    last.wait_for(rf"step {STEPS}/{STEPS} ")
    last.press_ctrl_c()
    # The last step is done: what is left is the report, which is written.
    assert last.end() in (0, 75), last.said
    assert "Traceback" not in last.said
    assert run(tmp_path, "stopped").end() == 0
    assert (tmp_path / "stopped" / "report.html").is_file()
    stopped, alone = (timeless_rows(open_store(str(tmp_path / name))) for name in ("stopped", "alone"))
    assert stopped == alone


def test_a_second_ctrl_c_during_the_start_ends_it_at_once(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(small_manifest(steps=2)))
    command = run(tmp_path, "run")
    command.wait_for("start: importing torch")
    command.press_ctrl_c()
    command.wait_for("press Ctrl-C again to end it at once")
    command.press_ctrl_c()
    assert command.end() == 75
    assert "Traceback" not in command.said
    # The first one may have been answered by then: torch was imported, and nothing more begins.
    assert re.search("stopped on request|starts again", command.said), command.said


def test_ctrl_c_ends_a_measurement_of_parity_too(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(small_manifest(steps=2)))
    command = Command(tmp_path, "parity", "run.yaml")
    command.wait_for("start: loading the model")
    command.press_ctrl_c()
    assert command.end() == 75
    assert "press Ctrl-C again to end it at once" in command.said
    assert "start: measuring" not in command.said
