"""Inspects the rank processes of one node from outside: alive, stopped or computing; their stacks, logs and notes.

Belongs here: what the kernel and the ranks' files say. It needs no answer from a rank, so it works for one that hangs.
Does not belong here: the interpretation (`rank_verdict`).
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from orbit_runtime.workers.rank_notes import Note, read_note
from orbit_runtime.workers.rank_process import collective_of, tail
from orbit_runtime.workers.server_process import memory_kills
from orbit_runtime.workers.stacks import STACK_SIGNAL

STACK_SECONDS = 2.0


@dataclass(frozen=True)
class Glance:
    """One rank at one moment."""

    state: str | None
    """State letter of proc(5): `T` is stopped; None if the process is gone."""
    note: Note


@dataclass(frozen=True)
class LookBack:
    """What is left of a rank, or the state of a living one whose call has failed."""

    state: str | None
    note: Note
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

    def glance(self, ranks: dict[int, int]) -> dict[int, Glance]:
        """Args: ranks: process id of each rank."""
        return {rank: Glance(process_state(pid), self._note(rank)) for rank, pid in ranks.items()}

    def look_back(self, ranks: dict[int, int]) -> dict[int, LookBack]:
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
            found[rank] = LookBack(process_state(pid), note, collective, text, log, killed, shared)
        return found

    def kill(self, pids: list[int]) -> None:
        """Kills processes at once, also stopped ones."""
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _note(self, rank: int) -> Note:
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
