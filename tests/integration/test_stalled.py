"""A device that never answers: the process ends by itself, with the stacks, and the same command goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orbit_runtime.storage import open_store
from orbit_runtime.workers.child import heartbeat
from orbit_runtime.workers.child.heartbeat import Stall, device_work, watch_stalls
from tests.integration.killing import small_manifest, timeless_rows
from tests.integration.run_launcher import RunLauncher

ROOT = Path(__file__).resolve().parents[2]
HUNG = """
import sys, threading
from orbit_runtime.workers.child import heartbeat
heartbeat.STALL_SECONDS, heartbeat.LOOK_SECONDS, heartbeat.WATCHED = 2.0, 0.2, frozenset({"cpu"})
from orbit_runtime.rollout import decoding
whole, calls = decoding.DecodingBatch.step, []
def step(self, told=None):
    calls.append(told)
    # Scoring in preflight is not sampling.
    if calls.count(None) == 12:
        threading.Event().wait()
    return whole(self, told)
decoding.DecodingBatch.step = step
from orbit_runtime.cli.main import main
main(sys.argv[1:])
"""
"""`orbit` with a device, here the CPU, that does not finish its twelfth step of sampling."""


@pytest.mark.timeout(600)
def test_a_step_that_never_ends_is_83_and_the_run_goes_on(tmp_path: Path, launcher: RunLauncher) -> None:
    manifest, out, alone = small_manifest(steps=3), str(tmp_path / "hung"), str(tmp_path / "alone")
    (tmp_path / "run.json").write_text(json.dumps(manifest))
    last_words = tmp_path / "termination"
    last_words.touch()
    hung = subprocess.run(
        [sys.executable, "-c", HUNG, "run", str(tmp_path / "run.json"), "--out", out],
        env={**os.environ, "PYTHONPATH": str(ROOT), "ORBIT_TERMINATION_FILE": str(last_words)},
        check=False, timeout=400, capture_output=True, text=True,
    )  # fmt: skip
    assert hung.returncode == 83, hung.stderr[-3000:]
    assert "a step of sampling did not end within 2 s (stage collect, step " in hung.stderr
    assert "Traceback" not in hung.stderr
    said = json.loads(last_words.read_text())
    assert (said["exit_code"], said["phase"]) == (83, "Failed")
    (stacks,) = Path(out, "failures").glob("step-*.stacks.txt")
    assert stacks.name in hung.stderr
    assert "Thread 0x" in stacks.read_text()
    assert "in _step" in stacks.read_text(), "who waits for the device"
    assert launcher.run(manifest, out) == 0
    assert launcher.run(manifest, alone) == 0
    assert timeless_rows(open_store(out)) == timeless_rows(open_store(alone))


def test_only_one_piece_of_work_that_does_not_end_is_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(heartbeat, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(heartbeat, "WATCHED", frozenset({"cpu"}))
    found: list[Stall] = []
    with watch_stalls(found.append):
        until = time.monotonic() + 0.6
        while time.monotonic() < until:
            with device_work("one of many", "cpu"), device_work("a part of it", "cpu"):
                time.sleep(0.01)
        assert found == []
        with device_work("one too many", "cpu"):
            until = time.monotonic() + 30
            while not found and time.monotonic() < until:
                with device_work("a part of it", "cpu"):
                    time.sleep(0.01)
    (stall,) = found
    assert stall.what == "one too many"
    assert "test_only_one_piece_of_work" in stall.stacks


def test_a_cpu_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(heartbeat, "STALL_SECONDS", 0.0)
    found: list[Stall] = []
    with watch_stalls(found.append), device_work("a large model", "cpu"):
        time.sleep(0.1)
    assert found == []


def test_a_command_without_a_run_ends_with_83_and_tells_the_stacks() -> None:
    code = (
        "import threading; from orbit_runtime.workers.child import heartbeat\n"
        "heartbeat.STALL_SECONDS, heartbeat.LOOK_SECONDS = 0.2, 0.05\n"
        "with heartbeat.watch_stalls(heartbeat.end_process), heartbeat.device_work('a step of sampling', 'cuda'):\n"
        "    threading.Event().wait()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, timeout=100, capture_output=True, text=True)
    assert ended.returncode == 83
    assert "error: a step of sampling did not end within" in ended.stderr
    assert "dmesg" in ended.stderr
    assert "in wait" in ended.stderr
