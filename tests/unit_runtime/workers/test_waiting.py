"""Threads wait asleep where trainer and server share cores, unless their user says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orbit_runtime.rollout.sglang_server import ServerSettings, server_variables
from orbit_runtime.workers.sglang_launch import launch_environment
from orbit_runtime.workers.waiting import VARIABLE, wait_asleep

SETTINGS = ServerSettings(
    model=Path("base"), device="cpu", dtype="float32", targets=("q_proj",), max_running_requests=1,
    max_sequence_length=8, seed=0,
)  # fmt: skip


def test_what_the_user_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {VARIABLE: "ACTIVE"}
    wait_asleep(environment)
    assert environment == {VARIABLE: "ACTIVE"}
    monkeypatch.setenv(VARIABLE, "ACTIVE")
    assert launch_environment(server_variables(SETTINGS, Path("taps")))[VARIABLE] == "ACTIVE"


def test_a_server_on_a_cpu_waits_asleep_and_one_on_a_gpu_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert server_variables(SETTINGS, Path("taps"))[VARIABLE] == "PASSIVE"
    assert VARIABLE not in server_variables(replace(SETTINGS, device="cuda"), Path("taps"))


def test_torch_is_not_there_yet_when_orbit_run_decides_how_threads_wait() -> None:
    """OpenMP reads it once, when it is loaded."""
    code = (
        "import sys, orbit_runtime.cli.run, orbit_runtime.cli.plan, orbit_runtime.spec, orbit_runtime.workers.waiting\n"
        "sys.exit('torch' in sys.modules)"
    )
    path = os.pathsep.join(each for each in sys.path if each)
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == 0
