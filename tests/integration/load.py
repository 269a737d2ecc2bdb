"""A machine that is busy with something else: processes that take the cores away.

Belongs here: the load. Does not belong here: what must not notice it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

THREADS = 2
ENVIRONMENT = {
    "OMP_NUM_THREADS": str(THREADS),
    "MKL_NUM_THREADS": str(THREADS),
    # Threads that spin while they wait for one without a core would take minutes for a step.
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Environment of a run under load: more than one thread, so that the order in which they arrive can matter."""

# Ends with its parent, however that ends.
_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"


@contextmanager
def busy_machine(processes_per_core: int = 2) -> Iterator[int]:
    """Within it every core is wanted by so many other processes; yields how many there are."""
    count = processes_per_core * len(os.sched_getaffinity(0))
    spinning = [subprocess.Popen([sys.executable, "-S", "-c", _SPIN]) for _ in range(count)]
    try:
        yield count
    finally:
        for process in spinning:
            process.kill()
        for process in spinning:
            process.wait()
