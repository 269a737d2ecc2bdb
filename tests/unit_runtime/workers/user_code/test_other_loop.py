"""Awaiting in one event loop what runs in another's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from orbit_runtime.workers.user_code.environment_pool import OtherLoop


@pytest.fixture
def other() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def thread_of(value: int) -> tuple[int, int]:
    await asyncio.sleep(0.001 * (value % 3))
    return value, threading.get_ident()


def test_each_call_gets_its_own_answer_from_the_other_thread(other: asyncio.AbstractEventLoop) -> None:
    there = OtherLoop(other)

    async def all_of_them() -> list[tuple[int, int]]:
        return list(await asyncio.gather(*(there.run(thread_of(value)) for value in range(300))))

    # Each run has a loop of its own.
    for _ in range(2):
        found = asyncio.run(all_of_them())
        assert [value for value, _ in found] == list(range(300))
        assert threading.get_ident() not in {thread for _, thread in found}


def test_an_error_there_is_raised_here(other: asyncio.AbstractEventLoop) -> None:
    async def fails() -> None:
        raise ConnectionError("it ended")

    with pytest.raises(ConnectionError, match="it ended"):
        asyncio.run(OtherLoop(other).run(fails()))


def test_what_is_cancelled_here_is_cancelled_there(other: asyncio.AbstractEventLoop) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def waits() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def main() -> None:
        waiting = asyncio.create_task(OtherLoop(other).run(waits()))
        await asyncio.to_thread(begun.wait, 10)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    assert ended.wait(10)


def test_a_closed_loop_is_told() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(OtherLoop(loop).run(thread_of(1)))
