"""A child process from both sides: how it is started and ended, the messages in its pipes, its stacks, what it prints.

Belongs here: what is the same for every kind. Does not belong here: what a child is told, or when it counts as
stopped.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orbit_runtime.workers.child.run_token import SERVE_VARIABLE, SERVICE_VARIABLE, UPDATE_VARIABLE

if TYPE_CHECKING:
    # A reward worker, which reads by blocking, starts without it.
    import asyncio

PACKAGE_ROOT = str(Path(__file__).parents[3])
"""The folder that Orbit is imported from."""
STACK_SIGNAL = signal.SIGUSR2
STACK_SECONDS = 1.0
"""Limit for writing the stacks; a process that is stopped in the kernel writes nothing."""
MAX_STACK = 1 << 14
"""Bytes of stacks to keep."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_SECONDS = 0.02
HEADER = 4
"""Bytes before each message in a pipe."""

# --- from the parent's side ---


def start_module(
    module: str, *arguments: object, pass_fds: Sequence[int] = (), **streams: Any
) -> subprocess.Popen[bytes]:
    """Starts `python -P -m module`, in a group of its own: killed whole, and Ctrl-C of the terminal does not reach it.

    Args: streams: `stdin`, `stdout` and `stderr`, as `Popen` takes them.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        pass_fds=pass_fds, env=child_environment(), start_new_session=True, **streams,
    )  # fmt: skip


def child_environment() -> dict[str, str]:
    """The environment of a process that runs a user's code: the parent's without the tokens of its ports, with Orbit
    importable and without a thread pool in every worker."""
    inherited = os.environ.get("PYTHONPATH")
    tokens = (SERVE_VARIABLE, SERVICE_VARIABLE, UPDATE_VARIABLE)
    return {
        "OMP_NUM_THREADS": "1",
        **{name: value for name, value in os.environ.items() if name not in tokens},
        "PYTHONPATH": os.pathsep.join([*([inherited] if inherited else []), PACKAGE_ROOT]),
    }


def import_path(folders: Sequence[str] = ()) -> list[str]:
    """These folders, followed by this process's import path."""
    return list(dict.fromkeys([*folders, *(folder or os.getcwd() for folder in sys.path)]))


def kill_group(pid: int) -> None:
    """Kills a child and everything that is still in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def describe_exit(code: int, killed: str = "was ended by", ended: str = "exited with") -> str:
    """Args: code: as `Popen.wait` returns it."""
    return f"{killed} {signal.Signals(-code).name}" if code < 0 else f"{ended} {code}"


class Stacks:
    """File for the stacks of one other process, which is given its `fd`."""

    def __init__(self) -> None:
        # Imported here, because a process that only writes stacks does not need it and should start fast.
        import tempfile

        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        self.fd = self._file.fileno()

    def ask(self, pid: int) -> str:
        """Waits until the stacks are complete; empty if the process writes none. The process must be a child that was
        not waited for, so its id cannot belong to another."""
        before = os.fstat(self.fd).st_size
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, STACK_SIGNAL)
            until, size = time.monotonic() + STACK_SECONDS, before
            while time.monotonic() < until:
                time.sleep(_LOOK_SECONDS)
                last, size = size, os.fstat(self.fd).st_size
                if size == last > before:
                    break
        return os.pread(self.fd, MAX_STACK, before).decode(errors="replace")

    def close(self) -> None:
        self._file.close()


class OutputRelay:
    """Passes everything that processes of one kind print on to standard error, up to a limit, which is reported once.

    Args:
        who: whose output it is, in the plural, such as `rewards`.
        limit: bytes that are passed on.
    """

    def __init__(self, who: str, limit: int) -> None:
        self._who = who
        self._limit = limit
        self._seen = 0

    def pass_on(self, data: bytes) -> None:
        """Writes the part of `data` that is within the limit to standard error."""
        before, self._seen = self._seen, self._seen + len(data)
        # Standard error may be gone: prints are no reason to end a run.
        with contextlib.suppress(OSError):
            write_all(2, data[: max(0, self._limit - before)])
            if before <= self._limit < self._seen:
                write_all(
                    2,
                    f"\n({self._who} printed too much: of what they print from now on, nothing is shown. "
                    f"{self._limit >> 10} KiB are shown; write what is to be kept to a file)\n".encode(),
                )


# --- from inside ---


def end_with_parent(parent_pid: int) -> None:
    """Makes this process die with its parent, also if the parent is killed, and also while it loops."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # it was gone before the request stood
        os._exit(0)


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(1.0)
    os._exit(0)


def adopt_orphans() -> None:
    """Whatever a child of this process leaves behind becomes this process's child instead of init's."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def dump_stacks_on_signal(fd: int) -> None:
    """Makes this process write its threads' stacks to `fd` on the signal. They are written from C, so code that never
    returns to the interpreter does not prevent it.
    """
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True)


def thread_stack(thread: threading.Thread) -> str:
    """Stack of a thread of this process; empty once it has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame))[-MAX_STACK:] if frame is not None else ""


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


# --- messages in a pipe: each is 4 bytes of length, big-endian, then its body ---


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER, "big") + body


def read_frame(read: Callable[[int], bytes]) -> bytes | None:
    """The next body, or None at the end of the stream. Args: read: blocks until it has so many bytes, or the stream
    ends."""
    header = read(HEADER)
    if len(header) < HEADER:
        return None
    size = int.from_bytes(header, "big")
    body = read(size)
    return body if len(body) == size else None


async def receive_frame(reader: asyncio.StreamReader) -> bytes:
    """The next body. Raises asyncio.IncompleteReadError at the end of the stream."""
    return await reader.readexactly(int.from_bytes(await reader.readexactly(HEADER), "big"))


class Frames:
    """Bodies out of bytes that arrive in any pieces."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are complete with this piece."""
        self._unread += data
        found, start = [], 0
        while len(self._unread) >= start + HEADER:
            begin = start + HEADER
            end = begin + int.from_bytes(self._unread[start:begin], "big")
            if len(self._unread) < end:
                break
            found.append(bytes(self._unread[begin:end]))
            start = end
        del self._unread[:start]
        return found
