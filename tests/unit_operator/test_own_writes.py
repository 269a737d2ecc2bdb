"""What the operator wrote itself comes back by watching, and is no news."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("kopf", reason="the operator's packages are not installed (extra `operator`)")

from orbit_operator.cache import Cache, Child, Key, RawRun
from orbit_operator.facts import PodFacts
from orbit_operator.main import Operator
from orbit_operator.read import pack_run
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


@pytest.mark.parametrize(
    ("status", "head", "seconds"),
    [
        ({"phase": "Running"}, {}, 300.0),
        ({"completionTime": "2026-01-01T00:00:00Z"}, {}, 3600.0),
        ({"completionTime": "2026-01-01T00:00:00Z"}, {"deletionTimestamp": "2026-01-02T00:00:00Z"}, 300.0),
    ],
)
def test_only_a_run_that_has_ended_is_left_alone_for_long(
    status: dict[str, Any], head: dict[str, Any], seconds: float
) -> None:
    operator = Operator(Settings(), NO_API)
    head = {"namespace": "team", "name": "adder", "uid": "r", "resourceVersion": "1", **head}
    operator.cache.runs.put(KEY, "r", pack_run({"metadata": head, "spec": {}, "status": status}), 1)
    assert operator.longest_wait(KEY) == seconds
    assert operator.unended() == ([] if seconds > 300.0 else [KEY])


@pytest.mark.parametrize(("ends", "looks"), [(False, 1), (True, 0)])
def test_what_ended_while_the_next_look_was_waited_for_is_not_looked_at(ends: bool, looks: int) -> None:
    head = {"namespace": "team", "name": "adder", "uid": "r", "resourceVersion": "1"}

    def run(status: dict[str, Any]) -> RawRun:
        return pack_run({"metadata": head, "spec": {}, "status": status})

    async def work() -> None:
        operator = Operator(Settings(resync_seconds=0.05), NO_API)
        operator.cache.runs.put(KEY, "r", run({"phase": "Running"}), 1)
        looking = asyncio.create_task(operator.look_again())
        await asyncio.sleep(0)
        if ends:
            operator.cache.runs.put(KEY, "r", run({"completionTime": "2026-01-01T00:00:00Z"}), 2)
        # A few looks are spread over a third of a second.
        await asyncio.sleep(0.6)
        looking.cancel()
        assert len(operator.queue) == looks

    asyncio.run(work())


def test_a_run_that_is_gone_leaves_nothing_behind() -> None:
    operator = Operator(Settings(), NO_API)
    operator.cache.put_written(KEY, RawRun("r", b"", "11"))
    operator.cache.forget_run("r")
    assert not operator.cache.is_known("r", 1)


def test_children_of_a_run_that_is_gone_are_not_remembered() -> None:
    """Its pods usually outlive it."""
    cache = Cache()
    cache.runs.put(KEY, "r", RawRun("r", b"", "5"), 5)
    cache.put_pod(KEY, Child("r", PodFacts("adder-a1-x", "p", 1)), 6)
    assert cache.had_children("r")
    cache.runs.drop("r")
    cache.forget_run("r")
    cache.put_pod(KEY, Child("r", PodFacts("adder-a1-x", "p", 1, phase="Failed")), 7)
    assert not cache.had_children("r")
