"""Being asked to stop, and asked again: by real signals, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ASKED_TWICE = """
import os, signal, sys, threading, time
from orbit_runtime.workers.child.signals import stop_on_signals

told = threading.Event()
try:
    with stop_on_signals() as stop:
        stop.on_request = told.set
        os.kill(os.getpid(), signal.{first})
        assert told.wait(60)
        # The thread that tells has had the time to end, if it is one that ends.
        time.sleep(0.3)
        os.kill(os.getpid(), signal.{second})
        time.sleep(60)
except KeyboardInterrupt:
    print("at once", stop.reason)
"""

STUBBORN = """
import os, signal, subprocess, sys
from pathlib import Path
from orbit_runtime.workers.child.signals import interrupt_on_terminate
from orbit_runtime.services.children import Children

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"

class Stubborn(Children):
    def _start(self, kind):
        child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
        self._processes[kind] = child

try:
    with interrupt_on_terminate(), Stubborn(["trainer", "inference"], Path("run.json"), [], print) as children:
        print(children.pid("trainer"), children.pid("inference"), children._scratch.name, flush=True)
except KeyboardInterrupt:
    sys.exit(75)
"""


@pytest.mark.parametrize(("first", "second"), [("SIGINT", "SIGINT"), ("SIGTERM", "SIGTERM"), ("SIGINT", "SIGTERM")])
def test_a_second_signal_ends_at_once_and_says_nothing_of_pipes(first: str, second: str) -> None:
    program = ASKED_TWICE.format(first=first, second=second)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"at once {first}\n", "")


def test_children_are_gone_although_their_end_was_interrupted() -> None:
    """They ignore SIGTERM, so that ending them takes five seconds each; a SIGTERM comes after one."""
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        *pids, scratch = process.stdout.readline().split()
        time.sleep(1.0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
    for pid in map(int, pids):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not Path(scratch).exists()
