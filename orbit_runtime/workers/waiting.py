"""How the threads of a computing process wait for each other when another process computes on the same cores.

OpenMP busy-waits for a while by default. Of two processes that do so on the same cores, each keeps the threads that the
other waits for from running: measured on two cores, a decode step took a second instead of 30 ms while the trainer read
a canary.

Belongs here: this one setting. Does not belong here: the number of threads, which its user decides.
"""

from __future__ import annotations

from collections.abc import MutableMapping

VARIABLE = "OMP_WAIT_POLICY"


def wait_asleep(environment: MutableMapping[str, str]) -> None:
    """Sets it unless it is set. It must be set before torch is imported, or before the process starts."""
    environment.setdefault(VARIABLE, "PASSIVE")
