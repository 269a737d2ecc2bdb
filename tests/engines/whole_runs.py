"""Commands of `orbit` in processes of their own, for tests that kill them or what they have started.

Belongs here: starting, waiting, and that nothing stays. Does not belong here: which runs, and what is expected of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
_started: list[subprocess.Popen[bytes]] = []


def start_run(manifest: str, out: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """Args: manifest: of `examples/`. overrides: with `spec.` before them."""
    more = [part for each in overrides for part in ("--set", each)]
    return start_command(out, "run", str(ROOT / "examples" / manifest), "--out", str(out), *more)


def start_command(out: Path, *arguments: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
    """`orbit ARGUMENTS`. Args: out: its log is beside this folder. stdout: None: there too."""
    command = [sys.executable, "-m", "orbit_runtime.cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log_of(out).open("ab") as log:
        run = subprocess.Popen(command, env=environment, stdout=log if stdout is None else stdout, stderr=log)
    _started.append(run)
    return run


def log_of(out: Path) -> Path:
    return out.with_suffix(".log")


def wait_for_step(out: Path, step: int, run: subprocess.Popen[bytes], *, seconds: float = 600) -> None:
    until = time.monotonic() + seconds
    while not (out / "metrics" / f"step-{step:06d}.json").exists():
        assert run.poll() is None, log_of(out).read_text()[-3000:]
        assert time.monotonic() < until
        time.sleep(0.2)


def end_runs() -> None:
    """A test that fails leaves no run behind, and a run that ends ends its servers."""
    while _started:
        run = _started.pop()
        run.kill()
        run.wait()
