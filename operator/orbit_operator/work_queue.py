"""The queue of runs to look at: each key once, one worker per key, growing delays after failures."""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Callable

FIRST_RETRY = 0.5
LONGEST_RETRY = 30.0


class WorkQueue[K]:
    """Belongs to one event loop. A key that is added while a worker holds it is queued once more afterwards.

    Args:
        draw: a number in [0, 1) for the jitter.
        waited: called with the seconds for which a key was ready before a worker took it.
        clock: measures those seconds.
    """

    def __init__(
        self,
        draw: Callable[[], float] = random.random,
        waited: Callable[[float], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._draw = draw
        self._waited = waited
        self._clock = clock
        self._ready: OrderedDict[K, float] = OrderedDict()
        """Ready keys, and when each became ready."""
        self._working: set[K] = set()
        self._again: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._filled = asyncio.Event()

    def add(self, key: K) -> None:
        if key in self._working:
            self._again.add(key)
        elif key not in self._ready:
            self._ready[key] = self._clock()
            self._filled.set()

    def add_after(self, key: K, seconds: float) -> None:
        """Adds the key after a delay. There is one timer per key: the earlier wins."""
        loop = asyncio.get_running_loop()
        due = loop.time() + max(0.0, seconds)
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= due:
                return
            timer.cancel()
        self._timers[key] = loop.call_at(due, self._ring, key)

    def is_working(self, key: K) -> bool:
        return key in self._working

    async def get(self) -> K:
        while not self._ready:
            self._filled.clear()
            await self._filled.wait()
        key, since = self._ready.popitem(last=False)
        self._waited(self._clock() - since)
        self._working.add(key)
        return key

    def done(self, key: K) -> None:
        """The key was handled successfully."""
        self._failures.pop(key, None)
        self._release(key)

    def failed(self, key: K, at_least: float = 0.0) -> float:
        """Schedules the key again after a delay that doubles with each failure; returns the delay."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        delay = max(at_least, min(LONGEST_RETRY, FIRST_RETRY * 2.0 ** (count - 1)) * (0.5 + self._draw()))
        self._release(key)
        self.add_after(key, delay)
        return delay

    def __len__(self) -> int:
        return len(self._ready)

    def _release(self, key: K) -> None:
        self._working.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _ring(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)
