"""The programs that check the chart: found, never built. `make check-chart` provides them.

A missing one is a failure here, with what to do, not a skip: this folder has nothing to say without them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/orbit"
FOLDER = "ORBIT_TEST_PROGRAMS"
HELMS = ("helm3", "helm4")


@cache
def find_program(name: str) -> str:
    """Path of a program in the folders of `ORBIT_TEST_PROGRAMS` (separated as in PATH), else on PATH."""
    found = shutil.which(name, path=os.environ.get(FOLDER)) or shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is neither in the folders of {FOLDER} nor on PATH: run `make check-chart`", pytrace=False)
    return found


def run(*command: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a program to its end; the caller judges its exit status."""
    return subprocess.run([str(part) for part in command], input=stdin, capture_output=True, text=True, timeout=100)


def run_well(*command: str | Path, stdin: str = "") -> str:
    """Runs a program that must succeed; its standard output."""
    done = run(*command, stdin=stdin)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout
