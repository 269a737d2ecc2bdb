"""Identifies a process, so that another on the same machine can tell whether it still runs."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """One process, distinguished from later ones with the same pid.

    Example: `Process("gpu-7", "5c1e…", "pid:[4026]", 17, 912)`
    """

    host: str
    boot_id: str | None
    pid_namespace: str | None
    """Two containers on a machine may share its name without seeing each other's processes."""
    pid: int
    start_ticks: int | None
    """Start time in clock ticks since boot."""


def current_process() -> Process:
    """This process."""
    return Process(socket.gethostname(), _boot_id(), _pid_namespace(), os.getpid(), _start_ticks(os.getpid()))


def is_gone(process: Process, here: Process) -> bool:
    """Whether a process, seen from `here`, has provably ended. `False` if in doubt."""
    if process.host != here.host or process.boot_id is None or here.boot_id is None:
        return False
    if process.boot_id != here.boot_id:
        # The machine of that name was restarted, unless two machines share a name.
        return False
    if process.pid_namespace is None or process.pid_namespace != here.pid_namespace or process.start_ticks is None:
        return False
    return _start_ticks(process.pid) != process.start_ticks


def _start_ticks(pid: int) -> int | None:
    """`None` if the process is gone or a zombie, or if there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may itself contain spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _pid_namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
