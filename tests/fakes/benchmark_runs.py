"""Starts a benchmark at its smallest size, and says what its two ways to end look like.

Belongs here: starting and looking. Does not belong here: which benchmark can be measured where (each folder's test).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness import NOT_MEASURED, ROOT

Done = subprocess.CompletedProcess[str]
SECONDS = 570.0


def start_smallest(
    name: str, out: Path, options: Sequence[str] = (), *, without: Sequence[str] = (), seconds: float = SECONDS
) -> Done:
    """`without`: environment variables that it does not get."""
    environment: Mapping[str, str] = {key: value for key, value in os.environ.items() if key not in without}
    command = [sys.executable, f"benchmarks/{name}.py", "--smallest", "--out", str(out), *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)


def assert_measured(name: str, done: Done, out: Path) -> None:
    """Exit status 0, and one file with what was measured, where and on which commit."""
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    (path,) = out.iterdir()
    assert path.name.startswith(name)
    result = json.loads(path.read_text())
    assert result["comparisons"] or result["figures"]
    assert result["smallest"] is True
    assert {"commit", "dirty", "machine"} <= result.keys()


def assert_not_measured(name: str, done: Done, out: Path, reason: str) -> None:
    """The status of what was not measured, the reason as the last words, and no file."""
    assert done.returncode == NOT_MEASURED, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"{name}: not measured: ")
    assert reason in last
    assert not out.exists() or not list(out.iterdir())
