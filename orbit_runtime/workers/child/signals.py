"""SIGINT and SIGTERM as a flag that the loop reads between stages."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StopFlag:
    """Set once, never cleared. A second signal interrupts at once, as Python does on Ctrl-C."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.on_request: Callable[[], None] = lambda: None
        """Called once, from a thread of its own, as soon as the first signal arrives."""

    def request(self, reason: str) -> None:
        self.reason = self.reason or reason

    def __bool__(self) -> bool:
        return self.reason is not None


@contextmanager
def interrupt_on_terminate() -> Iterator[None]:
    """While active, SIGTERM raises KeyboardInterrupt as Ctrl-C does, so that child processes are ended too. A nested
    `stop_on_signals` takes precedence. Has no effect outside the main thread."""
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
    """While active, SIGINT and SIGTERM set the flag. Outside the main thread, which gets no signals, it stays unset."""
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
    """Starts the thread that calls `flag.on_request`; returns the function that ends it.

    A Python signal handler runs only once the main thread returns from C, for example after a whole backward pass. But
    Python writes the signal's number to its wake-up descriptor at once.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def wait() -> None:
        is_told = False
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            # Read to the end: a second signal is written as well, and Python complains about a pipe nobody reads.
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
