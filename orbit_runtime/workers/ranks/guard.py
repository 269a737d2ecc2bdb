"""The process that outlives all others of a group of ranks, and ends them: `python -m ... ADDRESS...`.

It is the *subreaper* (prctl(2)) of its descendants: a process whose parent died becomes its child instead of init's.
Walking down from here therefore finds all of them, including daemons and stopped ones. The run holds the other end of a
pipe; however the run ends, the pipe closes.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from orbit_runtime.workers.child.process import KILL_SECONDS, adopt_orphans, end_all

TICK = 0.1
MARK = "ORBIT_RANKS"
"""Environment variable of every process below a guard; holds the group's folder."""


def main(life: int, folder: str, driver: list[str], passed: list[int]) -> int:
    """Runs the driver until it ends, or until the pipe closes; then ends everything. Returns 0."""
    # A signal to a service's whole group must not end ranks before the run has written its checkpoint.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    adopt_orphans()
    process = subprocess.Popen(driver, stdin=subprocess.DEVNULL, pass_fds=passed)
    for each in passed:
        os.close(each)
    while process.poll() is None and not select.select([life], [], [], TICK)[0]:
        pass
    end_all(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def end_marked(mark: str) -> None:
    """Kills every process of this group, in case its guard was killed. Looks once more when it found none: while the
    kernel starts a program, the process shows no environment."""
    wanted, until, looks_left = f"{MARK}={mark}".encode(), time.monotonic() + KILL_SECONDS, 2
    while time.monotonic() < until and looks_left:
        found = []
        for place in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if wanted in place.read_bytes().split(b"\0"):
                    found.append(int(place.parent.name))
        looks_left = 2 if found else looks_left - 1
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[4:], [int(each) for each in sys.argv[3].split(",")]))
