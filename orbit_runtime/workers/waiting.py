"""How the threads of a computing process wait for each other, where another process computes on the same cores.

OpenMP's default is to turn in circles for a while. Of two processes that do so on the same cores, each keeps the thread
that the other waits for from running: measured on two cores, a step of decoding took a second instead of 30 ms while
the trainer read a canary.

Belongs here: that one setting. Does not belong here: how many threads there are, which its user decides.
"""

from __future__ import annotations

from collections.abc import MutableMapping

VARIABLE = "OMP_WAIT_POLICY"


def wait_asleep(environment: MutableMapping[str, str]) -> None:
    """Sets it unless it is set. It must be there before torch is imported, or the process started."""
    environment.setdefault(VARIABLE, "PASSIVE")
