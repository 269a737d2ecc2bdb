"""Python stacks of our processes: each writes those of its threads when it gets a signal.

Belongs here: both ends of that. Does not belong here: when something counts as stopped (the pools, `node_watch`).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress

STACK_SIGNAL = signal.SIGUSR2
STACK_SECONDS = 1.0
"""Limit for writing the stacks; a process that is stopped in the kernel writes nothing."""
MAX_STACK = 1 << 14
"""Bytes of stacks to keep."""
_LOOK_SECONDS = 0.02


def tell_stacks(fd: int) -> None:
    """From now on this process writes its threads' stacks to `fd` whenever the signal arrives. They are written from C,
    so code that never returns to the interpreter does not prevent it."""
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True)


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
        with suppress(ProcessLookupError, PermissionError):
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


def thread_stack(thread: threading.Thread) -> str:
    """Stack of a thread of this process; empty once it has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame))[-MAX_STACK:] if frame is not None else ""
