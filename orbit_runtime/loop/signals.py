"""SIGINT and SIGTERM as a flag that the loop reads between stages.

Belongs here: turning signals into a request to stop. Does not belong here: what stopping does (`steps`).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StopFlag:
    """Set once, never cleared. A second signal means now: the process ends as Python ends on an interrupt."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.on_request: Callable[[], None] = lambda: None
        """Called once, by a thread of its own, as soon as the first signal arrives."""

    def request(self, reason: str) -> None:
        self.reason = self.reason or reason

    def __bool__(self) -> bool:
        return self.reason is not None


@contextmanager
def interrupt_on_terminate() -> Iterator[None]:
    """Within it, SIGTERM ends what runs as Ctrl-C does, so that what was started is ended too; `stop_on_signals` inside
    has its own say. Outside the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Within it, SIGINT and SIGTERM set the flag. Outside the main thread, which has no signals, it stays unset."""
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        if flag:
            raise KeyboardInterrupt
        flag.request(signal.Signals(number).name)

    end_telling = _tell_of_first(flag)
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        end_telling()


def _tell_of_first(flag: StopFlag) -> Callable[[], None]:
    """Starts the thread that calls `flag.on_request`; returns what ends it.

    A handler of Python's waits until the main thread returns from C, such as from a whole backward pass. Python writes
    a signal's number to its wake-up descriptor at once.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def wait() -> None:
        is_told = False
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            # To its end: a second signal is written as well, and Python complains of a pipe that nobody reads.
            while number := pipe.read(1):
                if number[0] in (signal.SIGINT, signal.SIGTERM) and not is_told:
                    is_told = True
                    flag.on_request()

    thread = threading.Thread(target=wait, name="orbit-stop", daemon=True)
    thread.start()

    def end() -> None:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join(1.0)

    return end
