"""Nothing of a bed stays behind, however the tests end. These run before the bed of the other tests is started."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster.bed.cleanup import list_leftovers, remove_leftovers
from cluster.bed.cluster import LOCK, hold_machine
from cluster.bed.programs import find_program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
HOLD = """
import signal, sys, time
from pathlib import Path
from cluster.bed.cluster import run_cluster
signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background jobs ignore it.
with run_cluster(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_of_a_bed_stays_behind(number: int, tmp_path: Path) -> None:
    """Ctrl-C ends it in order; after a kill its servers end with the tests, and the reaper removes the rest."""
    find_program("kubelet")
    with hold_machine():
        assert list_leftovers() == []
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}"}
    program = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert list_leftovers(), "while it runs there is something to list"
        process.send_signal(number)
        process.wait(60)
        with LOCK.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # The reaper has it until it is done.
            assert list_leftovers() == []
        assert not Path("/var/lib/kubelet").exists()
        assert not Path("/var/log/containers").exists()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
            remove_leftovers()
