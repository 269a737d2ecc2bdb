"""What Kueue reports about a Job that it queues.

Belongs here: which version of Kueue's API answers, and which condition of a Workload is most informative.
Does not belong here: what the run's state becomes (`describe`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from orbit_operator.api import Api, ApiError, Kind
from orbit_operator.facts import QueueFacts

WORKLOADS = tuple(Kind(f"/apis/kueue.x-k8s.io/{version}", "workloads") for version in ("v1beta2", "v1beta1"))
"""Newest first. The fields that we read, a Workload's label and conditions, are the same in both versions."""
ABSENT_SECONDS = 60.0
"""If no version is served, none is requested again before this time has passed."""


class Kueue:
    """Requests Workloads in the version that answered last. `clock` counts seconds from any origin."""

    def __init__(self, api: Api, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._served: Kind | None = None
        self._absent_since: float | None = None

    async def ask(self, namespace: str, job_uid: str) -> QueueFacts | None:
        """`None` without Kueue, without the right to read it, or before it has created the Job's Workload."""
        if self._absent_since is not None and self._clock() - self._absent_since < ABSENT_SECONDS:
            return None
        remembered = () if self._served is None else (self._served,)
        for kind in (*remembered, *(each for each in WORKLOADS if each not in remembered)):
            try:
                found = await self._first(kind, namespace, job_uid)
            except ApiError as error:
                if error.status != 404:
                    return None
                # Kueue was upgraded or removed.
                self._served = None
            else:
                self._served, self._absent_since = kind, None
                return found
        self._absent_since = self._clock()
        return None

    async def _first(self, kind: Kind, namespace: str, job_uid: str) -> QueueFacts | None:
        selector = f"kueue.x-k8s.io/job-uid={job_uid}"
        async for item in self._api.list(kind, namespace, {"labelSelector": selector}):
            return read_workload(item)
        return None


def read_workload(workload: Mapping[str, Any]) -> QueueFacts:
    """The most informative condition of a Workload: why it was evicted, or why it waits."""
    conditions = {each["type"]: each for each in (workload.get("status") or {}).get("conditions") or ()}
    admitted = conditions.get("Admitted", {}).get("status") == "True"
    for kind in ("Evicted", "QuotaReserved", "Admitted"):
        found = conditions.get(kind)
        if found and found.get("status") == ("True" if kind == "Evicted" else "False"):
            return QueueFacts(str(found.get("reason") or kind), str(found.get("message") or "")[:900], admitted)
    return QueueFacts("QueuedByKueue", "waiting for the queue", admitted)
