"""Every key once, never two workers on one, failures later and later."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from orbit_operator.work_queue import FIRST_RETRY, LONGEST_RETRY, WorkQueue


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 5))


def test_a_key_that_is_added_twice_is_worked_on_once() -> None:
    async def work() -> None:
        queue: WorkQueue[str] = WorkQueue()
        for key in ("a", "b", "a"):
            queue.add(key)
        assert [await queue.get(), await queue.get()] == ["a", "b"]
        assert len(queue) == 0

    run(work())


def test_how_long_a_key_waited_is_told_from_when_it_was_first_added() -> None:
    async def work() -> None:
        now, waits = [10.0], list[float]()
        queue: WorkQueue[str] = WorkQueue(waited=waits.append, clock=lambda: now[0])
        queue.add("a")
        now[0] = 12.0
        queue.add("a")
        now[0] = 15.0
        await queue.get()
        assert waits == [5.0]

    run(work())


def test_a_key_that_is_added_while_it_is_worked_on_comes_again_and_never_twice_at_once() -> None:
    async def work() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("a")
        assert await queue.get() == "a"
        queue.add("a")
        assert len(queue) == 0
        queue.done("a")
        assert await queue.get() == "a"
        queue.done("a")
        assert len(queue) == 0

    run(work())


def test_a_worker_waits_for_work() -> None:
    async def work() -> None:
        queue: WorkQueue[str] = WorkQueue()
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        assert not waiting.done()
        queue.add("a")
        assert await waiting == "a"

    run(work())


def test_of_two_delays_the_earlier_wins() -> None:
    async def work() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add_after("a", 60)
        queue.add_after("a", 0.01)
        queue.add_after("a", 30)
        assert await queue.get() == "a"

    run(work())


def test_a_failure_is_retried_after_a_delay_that_doubles_and_starts_anew_after_a_success() -> None:
    async def work() -> None:
        queue: WorkQueue[str] = WorkQueue(draw=lambda: 0.5)
        delays = []
        for _ in range(12):
            queue.add("a")
            await queue.get()
            delays.append(queue.failed("a"))
        assert delays[:4] == [FIRST_RETRY, 2 * FIRST_RETRY, 4 * FIRST_RETRY, 8 * FIRST_RETRY]
        assert delays[-1] == LONGEST_RETRY
        queue.add("a")
        await queue.get()
        queue.done("a")
        queue.add("a")
        await queue.get()
        assert queue.failed("a") == FIRST_RETRY
        queue.add("b")
        await queue.get()
        assert queue.failed("b", at_least=7.0) == 7.0

    run(work())
