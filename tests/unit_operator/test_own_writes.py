"""What the operator wrote itself comes back by watching, and is no news."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("kopf", reason="the operator's packages are not installed (extra `operator`)")

from orbit_operator.cache import Key, RawRun
from orbit_operator.main import Operator
from orbit_operator.settings import Settings

KEY: Key = ("team", "adder")
NO_API: Any = None
"""Nothing here calls it."""


def test_a_version_that_was_written_here_is_no_news_and_a_later_one_is() -> None:
    operator = Operator(Settings(), NO_API)
    operator.cache.put_written(KEY, RawRun("r", b"", "11"))
    assert [operator.is_news(KEY, "r", version) for version in (10, 11, 12)] == [False, False, True]


def test_another_run_of_the_name_is_news() -> None:
    operator = Operator(Settings(), NO_API)
    operator.cache.put_written(KEY, RawRun("r", b"", "11"))
    assert operator.is_news(KEY, "s", 5)


@pytest.mark.parametrize(("version", "passes"), [(11, 0), (12, 1)])
def test_while_a_pass_writes_nobody_can_tell_so_it_is_told_afterwards(version: int, passes: int) -> None:
    """The event often comes before the answer to the call that caused it."""

    async def work() -> None:
        operator = Operator(Settings(), NO_API)
        operator.queue.add(KEY)
        assert await operator.queue.get() == KEY
        assert not operator.is_news(KEY, "r", version)
        operator.cache.put_written(KEY, RawRun("r", b"", "11"))
        operator.queue.done(KEY)
        operator.read_again(KEY)
        assert len(operator.queue) == passes
        operator.read_again(KEY)
        assert len(operator.queue) == passes

    asyncio.run(work())


def test_a_run_that_is_gone_leaves_nothing_behind() -> None:
    operator = Operator(Settings(), NO_API)
    operator.cache.put_written(KEY, RawRun("r", b"", "11"))
    operator.cache.forget_run("r")
    assert not operator.cache.is_known("r", 1)
