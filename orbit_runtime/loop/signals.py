"""SIGINT and SIGTERM as a flag that the loop reads between stages.

Belongs here: turning signals into a request to stop. Does not belong here: what stopping does (`sync`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopFlag:
    """Set once, never cleared. A second signal means now: the process ends as Python ends on an interrupt."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def request(self, reason: str) -> None:
        self.reason = self.reason or reason

    def __bool__(self) -> bool:
        return self.reason is not None


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

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
