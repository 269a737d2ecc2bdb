"""Facts about this machine and settings of this process."""

from __future__ import annotations

import gc
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

VARIABLE = "OMP_WAIT_POLICY"
RAY_ADDRESS = "RAY_ADDRESS"


def usable_memory() -> int | None:
    """Bytes of main memory, or the control group's limit if that is lower; None if neither can be read."""
    try:
        total: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        total = None
    limit = container_memory()
    return limit if total is None else min(total, limit or total)


def container_memory() -> int | None:
    """Bytes of main memory that the control group allows; None without a limit."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(path).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
    return None


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_kills(events: Path = Path("/sys/fs/cgroup/memory.events")) -> int:
    """Processes of this container that the kernel's OOM killer has ended; 0 if the kernel keeps no count."""
    try:
        counts = dict(line.split() for line in events.read_text(encoding="ascii").splitlines())
        return int(counts.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0


def ask_driver(fields: str) -> list[str]:
    """One line for each GPU that this process sees, in order; empty if the driver cannot be asked. Torch, which would
    take memory on each of them, is not needed.

    Args:
        fields: as `--query-gpu` takes them, such as `name,memory.total`; memory is in MiB, without the unit.
    """
    said = run_nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    return [line for line in said.splitlines() if line.strip()]


def run_nvidia_smi(*arguments: str) -> str:
    """What it prints; empty if it is not there, or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""


class ClosedAtEnd:
    """As a context, `close` ends it."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HeldPort:
    """A free port of the loopback device that the system assigns to no other process while this is open.

    A server that sets SO_REUSEADDR, as asyncio's, uvicorn's and SGLang's do, can bind it meanwhile: the socket that
    holds it does not listen. Without it, a process that asks for any free port, such as a rank, may get the one that a
    server was told to use and has not bound yet.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Safe to call twice."""
        self._socket.close()

    def __enter__(self) -> int:
        return self.number

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses garbage collection, collects once at the end, and freezes what is alive until `unfreeze_objects`.

    Packages and a model are hundreds of thousands of objects that stay. The collector would walk all of them each time
    their number has grown by a quarter, and later in the middle of steps. A nested block has no effect.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def unfreeze_objects() -> None:
    """Undoes freezing at the end of a run: otherwise a reference cycle that holds the model would
    never be collected.
    """
    gc.unfreeze()


def wait_asleep(environment: MutableMapping[str, str]) -> None:
    """Threads of a computing process wait for each other asleep, unless the variable is set already. It must be set
    before torch is imported, or before the process starts.

    OpenMP busy-waits for a while by default. Of two processes that do so on the same cores, each keeps the threads that
    the other waits for from running: measured on two cores, a decode step took a second instead of 30 ms while the
    trainer read a canary.
    """
    environment.setdefault(VARIABLE, "PASSIVE")


def joined_nodes(nodes: int) -> int:
    """`nodes` of `placement` if a Ray cluster is named; else 1: without one, a run uses the machine that it is on."""
    return nodes if ray_address() else 1


def ray_address() -> str | None:
    """`HOST:PORT` of the head of a Ray cluster."""
    return os.environ.get(RAY_ADDRESS) or None
