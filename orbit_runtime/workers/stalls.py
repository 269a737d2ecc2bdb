"""Work that a device never finishes: the process around it stays, busy and silent, and holds the GPU.

Belongs here: noticing it, with the stacks of all threads. Does not belong here: what follows (`loop.stalled`), or
ranks, which are watched from outside (`ray_driver`).
"""

from __future__ import annotations

import faulthandler
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from orbit_runtime.workers.stacks import MAX_STACK

STALL_SECONDS = 1800.0
"""For one decoding step or one micro-batch, which take seconds. Longer than the compilation of any kernel."""
LOOK_SECONDS = 5.0
WATCHED = frozenset({"cuda"})
"""Types of devices that can fail to answer. On a CPU a large model may honestly take this long."""

_numbers = itertools.count()
_under_way: dict[int, tuple[int, str]] = {}
"""By thread: a number that no other piece of work has, and what it is."""


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
    """Of all threads, newest call first."""


@contextmanager
def device_work(what: str, device_type: str) -> Iterator[None]:
    """Marks a piece of work that ends within minutes on a device that answers. Of nested pieces the outermost counts.

    Args: what: begins a sentence, such as `a step of sampling`.
    """
    thread = threading.get_ident()
    if device_type not in WATCHED or thread in _under_way:
        yield
        return
    _under_way[thread] = (next(_numbers), what)
    try:
        yield
    finally:
        del _under_way[thread]


@contextmanager
def watch_stalls(on_stall: Callable[[Stall], None]) -> Iterator[None]:
    """While active, `on_stall` is called, once and from another thread, when a piece of work does not end in time.

    Time is counted by looking: while the process is stopped, or the machine asleep, nobody looks and none passes.
    """
    ended = threading.Event()

    def look() -> None:
        first_seen: dict[int, int] = {}
        looks = 0
        while not ended.wait(LOOK_SECONDS):
            looks += 1
            now = list(_under_way.values())
            first_seen = {number: first_seen.get(number, looks) for number, _ in now}
            for number, what in now:
                seconds = (looks - first_seen[number]) * LOOK_SECONDS
                if seconds >= STALL_SECONDS:
                    on_stall(Stall(what, seconds, _stacks()))
                    return

    thread = threading.Thread(target=look, name="orbit-stalls", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        if threading.current_thread() is not thread:
            thread.join(1.0)


def _stacks() -> str:
    import tempfile

    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read(4 * MAX_STACK).decode(errors="replace")
