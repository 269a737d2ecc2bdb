"""Where a process of ours stands: the Python stacks of its threads, which it writes when a signal asks for them.

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
"""What writing them may take; a process that is stopped in the kernel writes nothing."""
MAX_STACK = 1 << 14
"""Bytes of them that are kept."""
_LOOK_SECONDS = 0.02


def tell_stacks(fd: int) -> None:
    """From now on this process writes there where its threads stand, whenever the signal comes: from C, so that code
    which never returns to the interpreter does not keep it from doing so."""
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True)


class Stacks:
    """What one other process writes: its `fd` is given to it."""

    def __init__(self) -> None:
        # A process that only tells has no use for it, and is to start at once.
        import tempfile

        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        self.fd = self._file.fileno()

    def ask(self, pid: int) -> str:
        """Waits until it stands there whole; empty where the process writes nothing. Of a child that was not waited
        for: its number is no other's."""
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
    """Of a thread of this process; empty once it has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame))[-MAX_STACK:] if frame is not None else ""
