"""Only one operator acts: the holder of the Lease, and only while it certainly holds it.

Belongs here: taking, renewing and releasing the Lease of an installation, and one in each namespace whose runs it acts
on. Does not belong here: what the holder does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from orbit_operator.api import LEASES, Api, ApiError, Body
from orbit_operator.timestamps import format_micro_time

_log = logging.getLogger("orbit.operator")
RENEWALS = 3.0
"""Number of renewals within the Lease's duration."""
RETRY_SECONDS = 0.5
"""Seconds to wait after a failed renewal, so that one more fits before the Lease lapses."""
CERTAIN = 2 / 3
"""Fraction of the duration after which acting stops without a renewal, so that differing clock rates do not matter."""


class LeaseLostError(Exception):
    """Another operator may be acting by now."""


class Lease:
    """The holder's side. `monotonic` measures how long a renewal holds; `clock` gives the times that are written."""

    def __init__(
        self,
        api: Api,
        *,
        namespace: str,
        name: str,
        holder: str,
        seconds: float,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._holder = holder
        self._seconds = seconds
        self._clock = clock
        self._monotonic = monotonic
        self._renewed: float | None = None
        self.problem = ""
        """Why the Lease could not be read or written at the last try."""
        self._seen: tuple[str, float] | None = None
        """Another holder's version, and when we first saw it by our own clock: its clock may differ."""

    @property
    def is_held(self) -> bool:
        return self._renewed is not None and self._monotonic() - self._renewed < CERTAIN * self._seconds

    def check(self) -> None:
        """Raises LeaseLostError if this operator must not write."""
        if not self.is_held:
            name = f"{self._namespace}/{self._name}"
            raise LeaseLostError(f"Lease {name} could not be renewed in time: another operator may hold it")

    async def acquire(self, stopping: asyncio.Event) -> bool:
        """Waits until the Lease is ours; returns False if stopped first."""
        while not stopping.is_set():
            pause = self._seconds / RENEWALS
            try:
                if await self.try_once():
                    return True
                self.problem = ""
            except ApiError as error:
                before, self.problem = self.problem, f"Lease {self._namespace}/{self._name} cannot be taken: {error}"
                if self.problem != before:
                    _log.warning("%s", self.problem)
                pause = pause if error.status else RETRY_SECONDS
            await _sleep(stopping, pause)
        return False

    async def keep(self, stopping: asyncio.Event) -> None:
        """Renews until stopped.

        Raises:
            LeaseLostError: the Lease has another holder, or could not be renewed in time.
        """
        pause = self._seconds / RENEWALS
        while not stopping.is_set():
            await _sleep(stopping, pause)
            pause = self._seconds / RENEWALS
            try:
                if not stopping.is_set() and not await self.try_once():
                    raise LeaseLostError(f"Lease {self._namespace}/{self._name} was taken over")
            except ApiError as error:
                _log.warning("Lease %s/%s was not renewed: %s", self._namespace, self._name, error)
                self.check()
                pause = RETRY_SECONDS

    async def release(self) -> None:
        """Releases the Lease, so that the next operator need not wait."""
        if not self.is_held:
            return
        self._renewed = None
        try:
            found = await self._api.get(LEASES, self._namespace, self._name)
            if found is not None and spec_of(found).get("holderIdentity") == self._holder:
                await self._put(found, "")
        except ApiError as error:
            _log.info("Lease %s/%s was not released: %s", self._namespace, self._name, error)

    async def try_once(self) -> bool:
        """Takes or renews the Lease, if that is possible now."""
        asked = self._monotonic()
        found = await self._api.get(LEASES, self._namespace, self._name)
        try:
            if found is None:
                await self._put(None)
            elif spec_of(found).get("holderIdentity") in (self._holder, "", None) or self._has_expired(found):
                await self._put(found)
            else:
                self._renewed = None
                return False
        except ApiError as error:
            if error.status in (404, 409):
                return self.is_held
            raise
        self._renewed = asked
        return True

    def _has_expired(self, found: Body) -> bool:
        """Whether the Lease has not changed for its whole duration while we watched."""
        version = found["metadata"]["resourceVersion"]
        if self._seen is None or self._seen[0] != version:
            self._seen = (version, self._monotonic())
        return self._monotonic() - self._seen[1] >= float(spec_of(found).get("leaseDurationSeconds") or self._seconds)

    async def _put(self, found: Body | None, holder: str | None = None) -> None:
        """Writes the whole Lease, provided that it is still at the version that was read."""
        now = format_micro_time(self._clock())
        spec: dict[str, Any] = dict(spec_of(found)) if found is not None else {}
        holder = self._holder if holder is None else holder
        if spec.get("holderIdentity") != holder:
            spec |= {"acquireTime": now, "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1}
        spec |= {"holderIdentity": holder, "leaseDurationSeconds": max(1, round(self._seconds)), "renewTime": now}
        head: Body = {"name": self._name, "namespace": self._namespace}
        if found is not None:
            # Keep the labels and annotations of the creator: Helm recognises its own objects by them.
            head = {name: value for name, value in found["metadata"].items() if name != "managedFields"}
        body: Body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": head, "spec": spec}
        if found is None:
            await self._api.create(LEASES, self._namespace, body)
        else:
            await self._api.replace(LEASES, self._namespace, body)


CLAIM, CLAIM_SECONDS = "orbit-runs", 60.0
"""Name and duration of the Lease by which an installation owns the runs of a namespace."""


class Claims:
    """Which namespaces this installation owns, so that no two installations act on one run.

    Args:
        holder: the installation's name, the same for each of its processes.
        others: filled with namespaces that another installation owns.
    """

    def __init__(
        self, api: Api, holder: str, others: set[str], *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._open = partial(Lease, api, name=CLAIM, holder=holder, seconds=CLAIM_SECONDS, monotonic=monotonic)
        self._others = others
        self._leases: dict[str, Lease] = {}
        self._turn = asyncio.Lock()

    async def hold(self, namespace: str) -> bool:
        """Takes the namespace if nobody owns it; whether it is ours now."""
        async with self._turn:
            lease = self._leases.setdefault(namespace, self._open(namespace=namespace))
            try:
                is_ours = lease.is_held or await lease.try_once()
            except ApiError as error:
                if "being terminated" not in error.message:
                    raise
                # A namespace that is being deleted takes no Lease, and its runs must still be let go.
                is_ours = True
        if is_ours:
            self._others.discard(namespace)
        elif namespace not in self._others:
            self._others.add(namespace)
            _log.error("another installation owns the runs of namespace %s (Lease %s there)", namespace, CLAIM)
        return is_ours

    async def keep(self, in_use: Callable[[], Iterable[str]]) -> None:
        """Renews the claims that are in use, for ever; the others may lapse until the next pass there."""
        while True:
            await asyncio.sleep(CLAIM_SECONDS / RENEWALS)
            for namespace in set(in_use()) & self._leases.keys():
                with contextlib.suppress(ApiError):
                    await self._leases[namespace].try_once()


def spec_of(lease: Body) -> dict[str, Any]:
    """The Lease's spec; empty if it was created for us and never taken."""
    return lease.get("spec") or {}


async def _sleep(stopping: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stopping.wait(), seconds)
    except TimeoutError:
        return
