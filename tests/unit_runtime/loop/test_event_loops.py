"""An event loop in its own thread and one in the caller's: the same to those who wait."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator

import pytest

from orbit_runtime.loop.collector import CallersThread, EventLoop, OwnThread


@pytest.fixture(params=["own", "caller's"])
def loop(request: pytest.FixtureRequest) -> Iterator[EventLoop]:
    made: EventLoop = OwnThread("episodes") if request.param == "own" else CallersThread()
    yield made
    made.close()


async def after(seconds: float, value: int = 7) -> int:
    await asyncio.sleep(seconds)
    return value


def test_what_was_started_ends_while_another_call_waits(loop: EventLoop) -> None:
    first = loop.start(after(0.01))
    assert loop.run(after(0.2, 8)) == 8
    assert first.done()
    assert first.result() == 7


def test_a_wait_ends_when_its_time_is_over_or_its_work_is_done(loop: EventLoop) -> None:
    started = loop.start(after(0.3))
    loop.wait(started, 0.01)
    assert not started.done()
    began = time.monotonic()
    loop.wait(started, 60.0)
    assert started.result() == 7
    assert time.monotonic() - began < 30


def test_errors_come_to_who_waits(loop: EventLoop) -> None:
    async def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        loop.run(fail())
    started = loop.start(fail())
    loop.wait(started, 60.0)
    with pytest.raises(ValueError, match="broken"):
        started.result()
    with pytest.raises(TimeoutError):
        loop.run(after(60.0), 0.01)


def test_what_is_cancelled_ends_with_the_next_call(loop: EventLoop) -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            ended.append("ended")

    started = loop.start(work())
    loop.wait(started, 0.05)
    started.cancel()
    loop.run(after(0.05))
    assert started.done()
    assert ended == ["ended"]


def test_an_error_that_nobody_asks_for_is_no_traceback(loop: EventLoop, capfd: pytest.CaptureFixture[str]) -> None:
    async def fail() -> None:
        raise ValueError("broken")

    loop.wait(loop.start(fail()), 60.0)
    gc.collect()
    assert "Traceback" not in capfd.readouterr().err


def test_which_thread_works() -> None:
    async def where() -> int:
        return threading.get_ident()

    own, callers = OwnThread("episodes"), CallersThread()
    try:
        assert own.run(where()) != threading.get_ident()
        assert callers.run(where()) == threading.get_ident()
    finally:
        own.close()
        callers.close()
