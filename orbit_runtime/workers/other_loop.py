"""Coroutines that run in another thread's event loop, and are awaited in this one's.

Belongs here: calls between two loops, many of them for one wake-up. Does not belong here: what runs (the pools).

`asyncio.run_coroutine_threadsafe` wakes the other loop for each call, and this one for each answer. When hundreds of
episodes take a turn at once, that is most of what a turn costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary


class _Mailbox:
    """Calls to be made in one loop. Any thread may post."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._is_woken = False

    def post(self, call: Callable[[], object]) -> None:
        """Raises RuntimeError if the loop is closed."""
        with self._lock:
            if not self._is_woken:
                self._loop.call_soon_threadsafe(self._make)
                self._is_woken = True
            self._calls.append(call)

    def _make(self) -> None:
        with self._lock:
            self._is_woken = False
            calls, self._calls = self._calls, deque()
        for call in calls:
            call()


class OtherLoop:
    """The way into `loop`, which runs in a thread of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asked = _Mailbox(loop)
        self._answered: WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = WeakKeyDictionary()
        self._lock = threading.Lock()

    async def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work`, which runs in the other loop; cancelled here, it is cancelled there.

        Raises:
            RuntimeError: the other loop is closed.
        """
        here = asyncio.get_running_loop()
        with self._lock:
            answers = self._answered.setdefault(here, _Mailbox(here))
        answer: asyncio.Future[T] = here.create_future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(tell)

        def tell(task: asyncio.Task[T]) -> None:
            # Closed: nobody waits any more.
            with contextlib.suppress(RuntimeError):
                answers.post(partial(_deliver, task, answer))

        try:
            self._asked.post(start)
        except RuntimeError:
            work.close()
            raise
        try:
            return await answer
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):
                self._asked.post(lambda: tasks[0].cancel())
            raise


def _deliver[T](task: asyncio.Task[T], answer: asyncio.Future[T]) -> None:
    error = None if task.cancelled() else task.exception()
    if answer.done():
        return
    if task.cancelled():
        answer.cancel()
    elif error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(task.result())
