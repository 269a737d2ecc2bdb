"""Observations of ranks from outside, and the report of their group on a failed call.

Belongs here: what the kernel and the ranks' files say of the processes of one node (alive, stopped or computing; their
stacks, logs and notes), which needs no answer from a rank, so it works for one that hangs; and the facts that travel
from the driver to the run, as plain values. Does not belong here: their interpretation (`verdict`).
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from orbit_runtime.workers.child.process import STACK_SIGNAL
from orbit_runtime.workers.ranks.rank import RankFailure, RankNote, collective_of, read_note, tail
from orbit_runtime.workers.system import memory_kills

STACK_SECONDS = 2.0


@dataclass(frozen=True)
class RankStatus:
    """One rank at one moment."""

    state: str | None
    """State letter of proc(5): `T` is stopped; None if the process is gone."""
    note: RankNote


@dataclass(frozen=True)
class RankRemains:
    """The remains of a rank, or the state of a living one whose call has failed."""

    state: str | None
    note: RankNote
    collective: str | None
    """The collective that it is in, according to its stacks, else to its note."""
    stacks: str
    log: tuple[str, ...]
    was_short_of_memory: bool
    """Whether the kernel's OOM killer ended processes of this container since the group began."""
    shared_memory_free: int
    """Free bytes in /dev/shm."""


class NodeWatch:
    """Watches the ranks on the node that it runs on."""

    def __init__(self, folder: str, events: str = "/sys/fs/cgroup/memory.events") -> None:
        self._folder = Path(folder)
        self._events = Path(events)
        self._kills = memory_kills(self._events)

    def glance(self, ranks: dict[int, int]) -> dict[int, RankStatus]:
        """Args: ranks: process id of each rank."""
        return {rank: RankStatus(process_state(pid), self._note(rank)) for rank, pid in ranks.items()}

    def look_back(self, ranks: dict[int, int]) -> dict[int, RankRemains]:
        """Includes the stacks of each rank that can still write them."""
        stacks = self._stacks(ranks)
        killed = memory_kills(self._events) > self._kills
        free = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
        shared = free.f_bavail * free.f_frsize if free else 0
        found = {}
        for rank, pid in ranks.items():
            text, note = stacks.get(rank, ""), self._note(rank)
            log = tuple(tail(self._folder / f"rank-{rank}.log"))
            collective = collective_of(text) or note.collective
            found[rank] = RankRemains(process_state(pid), note, collective, text, log, killed, shared)
        return found

    def kill(self, pids: list[int]) -> None:
        """Kills processes at once, also stopped ones."""
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _note(self, rank: int) -> RankNote:
        return read_note(self._folder / f"rank-{rank}.note")

    def _stacks(self, ranks: dict[int, int]) -> dict[int, str]:
        sizes = {}
        for rank, pid in ranks.items():
            path = self._folder / f"rank-{rank}.stacks"
            if process_state(pid) not in (None, "T", "Z"):
                with suppress(OSError):
                    sizes[rank] = path.stat().st_size
                    os.kill(pid, STACK_SIGNAL)
        until = time.monotonic() + STACK_SECONDS
        found: dict[int, str] = {}
        before: dict[int, str] = {}
        while sizes.keys() - found.keys() and time.monotonic() < until:
            time.sleep(0.05)
            for rank in sizes.keys() - found.keys():
                text = (self._folder / f"rank-{rank}.stacks").read_text(errors="replace")[sizes[rank] :]
                # Complete once it has stopped growing.
                if text and before.get(rank) == text:
                    found[rank] = text
                before[rank] = text
        return found


def process_state(pid: int) -> str | None:
    """State letter of proc(5); None if the process no longer exists."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


Ending = Literal["done", "failed", "lost", "pending"]


@dataclass(frozen=True, slots=True)
class ProgressSign:
    """A sign of progress from a rank before its answer."""


@dataclass(frozen=True)
class RankEnd:
    """The state of one rank when a call is given up."""

    rank: int
    device: str
    node: str
    ending: Ending
    seen: RankRemains | None
    """Observations by its node; None if that does not answer."""
    failure: RankFailure | None = None
    """Set if `ending` is `failed`."""
    said: str = ""
    """Ray's message about a rank that is `lost`."""


@dataclass(frozen=True)
class RankEvidence:
    """The state of all ranks, and other known facts."""

    method: str
    ranks: tuple[RankEnd, ...] = ()
    patience: float | None = None
    """Seconds without progress after which the call was given up; None if it was not given up for that."""
    lost: str | None = None
    """Anything else that has died, such as Ray's head, and how."""
    stopped: tuple[int, ...] = field(default=())
    """Ranks that were stopped (SIGSTOP) for longer than the group's limit."""
