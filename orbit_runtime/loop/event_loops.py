"""Where the episodes' event loop runs: in a thread of its own, or in the thread that waits for it.

Belongs here: starting coroutines from the loop's thread, and waiting for them. Does not belong here: what they do.

Torch keeps a team of threads for each thread that computes. With an engine in this process, two threads that compute
would be two teams on the same cores, whose threads then sleep between operations instead of waiting for the next one (a
step of the quickstart: 0.57 s instead of 0.35 s, decision 10). So an event loop has its own thread only where it is to
go on while the loop trains.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, Protocol

JOIN_SECONDS = 60.0
"""Limit for the end of a thread: a decode step is not interrupted."""


class Started[T](Protocol):
    """A coroutine that was started: a future of either kind."""

    def done(self) -> bool: ...

    def result(self) -> T:
        """Once it is done."""
        ...

    def cancel(self) -> bool: ...


class EventLoop(Protocol):
    """An event loop, as the thread that owns the run uses it."""

    def start[T](self, work: Coroutine[Any, Any, T]) -> Started[T]:
        """Returns at once."""
        ...

    def run[T](self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Waits for the result; raises TimeoutError after so long."""
        ...

    def wait(self, started: Started[Any], seconds: float) -> None:
        """Waits until it is done, at most so long."""
        ...

    def close(self) -> None:
        """Ends the loop; callers end what runs in it first."""
        ...


class OwnThread:
    """Goes on whatever the caller does."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start[T](self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run[T](self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        return self.start(work).result(seconds)

    def wait(self, started: Started[Any], seconds: float) -> None:
        assert isinstance(started, Future)
        wait((started,), seconds)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


class CallersThread:
    """Goes on while its caller waits in `run` or `wait`, and stands still otherwise."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def start[T](self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        # Who started it asks for its error, or has had another one: no traceback where nobody asks.
        task.add_done_callback(_retrieve)
        return task

    def run[T](self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(work, seconds))

    def wait(self, started: Started[Any], seconds: float) -> None:
        assert isinstance(started, asyncio.Task)
        self._loop.run_until_complete(asyncio.wait((started,), timeout=seconds))

    def close(self) -> None:
        self._loop.close()


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
