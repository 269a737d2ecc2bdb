"""One renewal that fails does not end the operator; a second one in time keeps the Lease."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("kopf", reason="the operator's packages are not installed (extra `operator`)")

from orbit_operator.api import ApiError
from orbit_operator.health import Health
from orbit_operator.lease import CLAIM_SECONDS, RETRY_SECONDS, Claims, Lease, LeaseLostError


class LeaseApi:
    """Keeps one Lease; `fails` says which of the looks at it get no answer, and how long they take. Hand-written."""

    def __init__(self, now: list[float], fails: dict[int, float]) -> None:
        self.now, self.fails, self.looks = now, fails, 0
        self.lease: dict[str, Any] | None = None

    async def get(self, *_: Any) -> dict[str, Any] | None:
        self.looks += 1
        if self.looks in self.fails:
            self.now[0] += self.fails[self.looks]
            raise ApiError(0, "TimeoutError", "")
        return self.lease

    async def create(self, _kind: Any, _namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        self.lease = {**body, "metadata": {**body["metadata"], "resourceVersion": "1"}}
        return self.lease

    async def replace(self, _kind: Any, _namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        self.lease = body
        return body


def keep(fails: dict[int, float], looks: int) -> float:
    """Keeps a Lease of 0.6 s until there were so many looks; returns how long ago it was renewed then."""

    async def work() -> float:
        now, stopping = [100.0], asyncio.Event()
        api = LeaseApi(now, fails)
        lease = Lease(
            api,  # type: ignore[arg-type]
            namespace="team", name="lease", holder="me", seconds=0.6, clock=lambda: 0.0, monotonic=lambda: now[0],
        )  # fmt: skip
        assert await lease.acquire(stopping)
        keeping = asyncio.create_task(lease.keep(stopping))
        while api.looks < looks and not keeping.done():
            await asyncio.sleep(0.01)
        stopping.set()
        await keeping
        assert lease._renewed is not None
        return now[0] - lease._renewed

    return asyncio.run(asyncio.wait_for(work(), 10))


def test_of_two_installations_one_owns_a_namespace_and_the_other_takes_it_once_it_is_left() -> None:
    async def work() -> None:
        now = [100.0]
        api: Any = LeaseApi(now, {})
        mine, theirs = set[str](), set[str]()
        first, again, second = (
            Claims(api, holder, others, monotonic=lambda: now[0])
            for holder, others in (("a/orbit", mine), ("a/orbit", mine), ("b/orbit", theirs))
        )
        assert await first.hold("team")
        assert not await second.hold("team")
        assert (mine, theirs) == (set(), {"team"})
        assert await again.hold("team"), "another process of the same installation, as after an upgrade"
        assert Health(others=theirs).note() == "another installation owns the runs of team"
        now[0] += CLAIM_SECONDS
        assert await second.hold("team")
        assert theirs == set()
        assert not await first.hold("team")

    asyncio.run(work())


@pytest.mark.parametrize(
    ("why", "acts"), [("because it is being terminated", True), ("leases is forbidden: no right", False)]
)
def test_a_namespace_that_is_being_deleted_takes_no_lease_and_its_runs_are_let_go(why: str, acts: bool) -> None:
    class Ending(LeaseApi):
        async def create(self, *_: Any) -> dict[str, Any]:
            raise ApiError(403, "Forbidden", why)

    api: Any = Ending([100.0], {})
    claims = Claims(api, "a/orbit", set())
    if acts:
        assert asyncio.run(claims.hold("team"))
    else:
        with pytest.raises(ApiError, match="no right"):
            asyncio.run(claims.hold("team"))


def test_after_one_renewal_without_an_answer_the_next_one_comes_in_time() -> None:
    assert keep({2: 0.3}, looks=3) == 0.0


def test_a_renewal_that_takes_too_long_loses_the_lease() -> None:
    with pytest.raises(LeaseLostError):
        keep({2: 0.5}, looks=4)


def test_the_second_attempt_starts_before_the_lease_stops_counting() -> None:
    """With the default of 15 s: renewed after 5 s, an answer is awaited for 4 s, and it counts for 10 s."""
    from orbit_operator.api import LEASE_SECONDS
    from orbit_operator.lease import CERTAIN, RENEWALS
    from orbit_operator.settings import Settings

    seconds = Settings().lease_seconds
    assert seconds / RENEWALS + LEASE_SECONDS + RETRY_SECONDS < CERTAIN * seconds


def test_a_connection_that_breaks_while_the_lease_is_taken_costs_half_a_second() -> None:
    """Not a third of the time that a Lease holds."""

    async def work() -> bool:
        lease = Lease(LeaseApi([0.0], {1: 0.0}), namespace="team", name="lease", holder="me", seconds=300)  # type: ignore[arg-type]
        return await lease.acquire(asyncio.Event())

    assert asyncio.run(asyncio.wait_for(work(), 10))


def test_a_lease_that_may_not_be_made_is_what_the_operator_is_not_ready_for() -> None:
    class Refusing(LeaseApi):
        async def create(self, *_: Any) -> dict[str, Any]:
            raise ApiError(403, "Forbidden", "cannot create resource leases")

    async def work() -> str:
        stopping = asyncio.Event()
        lease = Lease(Refusing([0.0], {}), namespace="team", name="lease", holder="me", seconds=0.3)  # type: ignore[arg-type]
        taking = asyncio.create_task(lease.acquire(stopping))
        while not lease.problem:
            await asyncio.sleep(0.01)
        stopping.set()
        assert not await taking
        return Health(lease_problem=lambda: lease.problem).find_unready()

    told = asyncio.run(asyncio.wait_for(work(), 10))
    assert told == "Lease team/lease cannot be taken: 403 Forbidden: cannot create resource leases"
    assert Health().find_unready() == "another operator holds the Lease"
