"""Events on a run, aggregated: a repeated message increments a count instead of creating an object."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from orbit_operator.actions import RunEvent
from orbit_operator.api import EVENTS, MANAGER, Api, ApiError
from orbit_operator.facts import RunFacts
from orbit_operator.timestamps import format_time
from orbit_runtime.spec.run import API_VERSION

BURST, PER_SECOND = 25.0, 1 / 60
"""Rate limit for each run. Events beyond it are dropped; the status says the same."""
REMEMBERED = 4096
_log = logging.getLogger("orbit.operator")


class Recorder:
    """Posts events. An event that cannot be posted is only logged: a run never waits for its events."""

    def __init__(self, api: Api, holder: str, clock: Callable[[], float] = time.time) -> None:
        self._api = api
        self._holder = holder
        self._clock = clock
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._allowance: OrderedDict[str, tuple[float, float]] = OrderedDict()

    async def post(self, run: RunFacts, event: RunEvent) -> None:
        if not self._is_allowed(run.uid):
            return
        name = event_name(run, event)
        count = self._counts.get(name, 0) + 1
        try:
            if count > 1:
                await self._count(run, name, count)
            else:
                count = await self._create(run, event, name)
        except ApiError as error:
            if error.status != 404:
                _log.warning("event %s of %s/%s was not posted: %s", event.reason, run.namespace, run.name, error)
            count = 0  # An event that has expired is created again.
        self._counts[name] = count
        self._counts.move_to_end(name)
        while len(self._counts) > REMEMBERED:
            self._counts.popitem(last=False)

    async def _create(self, run: RunFacts, event: RunEvent, name: str) -> int:
        try:
            await self._api.create(EVENTS, run.namespace, build_event(run, event, name, self._holder, self._clock()))
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            found = await self._api.get(EVENTS, run.namespace, name)
            count = int((found or {}).get("count") or 0) + 1
            await self._count(run, name, count)
            return count
        return 1

    async def _count(self, run: RunFacts, name: str, count: int) -> None:
        patch = {"count": count, "lastTimestamp": format_time(self._clock())}
        await self._api.merge(EVENTS, run.namespace, name, patch)

    def _is_allowed(self, uid: str) -> bool:
        now = self._clock()
        left, then = self._allowance.get(uid, (BURST, now))
        left = min(BURST, left + (now - then) * PER_SECOND)
        self._allowance[uid] = (left - 1 if left >= 1 else left, now)
        self._allowance.move_to_end(uid)
        while len(self._allowance) > REMEMBERED:
            self._allowance.popitem(last=False)
        return left >= 1


def event_name(run: RunFacts, event: RunEvent) -> str:
    """The same name for the same message about the same run, even after a restart of the operator."""
    digest = hashlib.sha256(f"{run.uid}\n{event.reason}\n{event.message}".encode()).hexdigest()
    return f"{run.name}.{digest[:16]}"


def build_event(run: RunFacts, event: RunEvent, name: str, holder: str, now: float) -> dict[str, Any]:
    when = format_time(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": run.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": "OrbitRun",
            "namespace": run.namespace,
            "name": run.name,
            "uid": run.uid,
        },
        "reason": event.reason,
        "message": event.message[:1023],
        "type": "Warning" if event.is_warning else "Normal",
        "source": {"component": MANAGER},
        "reportingComponent": MANAGER,
        "reportingInstance": holder[:128],
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
    }
