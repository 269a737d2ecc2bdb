"""Code that runs inside of a real server's process, between two of its passes: the way to plant a fault.

Belongs here: our side of `inside/sitecustomize.py`. Does not belong here: any fault.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from orbit_runtime.rollout.served_engine import ServedEngine
from tests.engines.servers import CODE_VARIABLE, INSIDE, server_of

SECONDS = 30.0


def inside_environment(code: Path) -> Mapping[str, str]:
    """What a server must be started with. Args: code: the file that its processes will look for."""
    paths = (INSIDE, os.environ.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), CODE_VARIABLE: str(code)}


def run_inside_of(engine: ServedEngine, code: Path, text: str, index: int = 0) -> None:
    """In one of the servers that the engine started. Args: index: of them."""
    run_inside(server_of(engine, index).pid, code, text)


def run_inside(pid: int, code: Path, text: str) -> None:
    """Runs `text` in the process that holds a server's adapters, with its LoRAManager as `manager`.

    Args:
        pid: of the server's first process.
        code: what the server was started with.
    """
    done = code.with_suffix(".done")
    done.unlink(missing_ok=True)
    code.write_text(text)
    for child in psutil.Process(pid).children(recursive=True):
        if "scheduler" in child.name() or "scheduler" in " ".join(child.cmdline()):
            child.send_signal(signal.SIGUSR2)
    until = time.monotonic() + SECONDS
    while not (done.exists() and done.read_text()):
        assert time.monotonic() < until, "no process ran the code"
        time.sleep(0.01)
    assert done.read_text() == "done", done.read_text()
