"""Signs of life: when a piece of this process's work last ended, and work on a device that does not end.

Belongs here: noticing it, with the stacks of all threads. Does not belong here: what follows (`loop.run`), or
ranks, which are watched from outside (`ray_driver`).
"""

from __future__ import annotations

import faulthandler
import itertools
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from orbit_runtime.errors import StalledError

STALL_SECONDS = 1800.0
"""Seconds without a sign of life after which a piece of a device's work, a rank, or a run counts as stalled. A decoding
step or a micro-batch takes seconds; no kernel takes as long to compile.
"""
LOOK_SECONDS = 5.0
FIX = "see the driver's log (`dmesg`, Xid errors), then start the same command again"
_MAX_STACKS = 1 << 18
WATCHED = frozenset({"cuda"})
"""Types of devices that can fail to answer. On a CPU a large model may honestly take this long."""

_newest = -math.inf
"""Time when the newest piece of work ended."""


def sign() -> None:
    """Says that a piece of work has ended. From any thread, and so cheap that each decoding step can afford it."""
    global _newest
    _newest = time.monotonic()


def silent_seconds() -> float:
    """Since the newest sign; infinite if there was none."""
    return time.monotonic() - _newest


_numbers = itertools.count()
_under_way: dict[int, tuple[int, str]] = {}
"""Thread → a number that no other piece of work has, and the work's name."""
_is_ours = threading.Event()


def own_process() -> None:
    """Says that this process exists for its run alone, and may end with it."""
    _is_ours.set()


def owns_process() -> bool:
    return _is_ours.is_set()


@dataclass(frozen=True, slots=True)
class Stall:
    what: str
    seconds: float
    stacks: str
    """The stack of the waiting thread, newest call last, then all threads' stacks, newest call first."""


@contextmanager
def device_work(what: str, device_type: str) -> Iterator[None]:
    """Marks a piece of work that ends within minutes on a device that answers; its end is a sign of life. Of nested
    pieces the outermost counts.

    Args: what: begins a sentence, such as `a step of sampling`.
    """
    thread = threading.get_ident()
    if device_type not in WATCHED or thread in _under_way:
        yield
        sign()
        return
    _watch.start()
    _under_way[thread] = (next(_numbers), what)
    try:
        yield
        sign()
    finally:
        del _under_way[thread]


@contextmanager
def watch_stalls(on_stall: Callable[[Stall], None]) -> Iterator[None]:
    """While active, `on_stall` is called from another thread, once, when a piece of work does not end in time.

    Of nested ones the innermost is called.
    """
    _watch.handlers.append(on_stall)
    try:
        yield
    finally:
        _watch.handlers.remove(on_stall)


def end_process(stall: Stall) -> None:
    """Prints the stacks and ends this process with 83: the reaction to a stall where nothing needs to be kept."""
    error = StalledError(f"{stall.what} did not end within {stall.seconds:.0f} s: the device does not answer", fix=FIX)
    print(f"error: {error}\n{stall.stacks}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)


class _Watch:
    """The thread that looks, from the first piece of work on.

    Time is counted by looking: while the process is stopped, or the machine asleep, nobody looks and none passes.
    """

    def __init__(self) -> None:
        self.handlers: list[Callable[[Stall], None]] = []
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def start(self) -> None:
        """Cheap where it looks already."""
        if self.handlers and (self._thread is None or not self._thread.is_alive()):
            with self._starting:
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(target=self._look, name="orbit-stalls", daemon=True)
                    self._thread.start()

    def _look(self) -> None:
        first_seen: dict[int, int] = {}
        told: set[int] = set()
        for looks in itertools.count():
            time.sleep(LOOK_SECONDS)
            now = list(_under_way.items())
            first_seen = {number: first_seen.get(number, looks) for _, (number, _) in now}
            for thread, (number, what) in now:
                seconds = (looks - first_seen[number]) * LOOK_SECONDS
                if seconds >= STALL_SECONDS and number not in told and self.handlers:
                    told.add(number)
                    self.handlers[-1](Stall(what, seconds, _stacks(thread)))


_watch = _Watch()


def _stacks(thread: int) -> str:
    import tempfile

    # Of many threads, faulthandler leaves out the oldest, which is the main thread.
    frame = sys._current_frames().get(thread)
    waits = "".join(traceback.format_stack(frame)) if frame is not None else ""

    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return f"The thread that waits:\n{waits}\n{file.read(_MAX_STACKS).decode(errors='replace')}"
