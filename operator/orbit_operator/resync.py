"""Checks the cache now and then: compares every object's version with the API server's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from orbit_operator.api import JOBS, PODS, RUNS, Api, ApiError, Kind
from orbit_operator.cache import Cache, Key, ObjectIndex, read_version
from orbit_operator.health import Health
from orbit_operator.manifests.source import RUN_UID

CHILDREN = f"{RUN_UID},app.kubernetes.io/managed-by=orbit-operator"
_log = logging.getLogger("orbit.operator")


class Resync:
    """One check at a time. A difference counts when two checks in a row find it: an update may be in transit."""

    def __init__(
        self,
        api: Api,
        cache: Cache,
        health: Health,
        namespaces: Iterable[str | None],
        changed: Callable[[Key], None],
    ) -> None:
        self._api = api
        self._health = health
        self._namespaces = tuple(namespaces)
        self._changed = changed
        self._shelves: tuple[tuple[Kind, ObjectIndex[Any], dict[str, str]], ...] = (
            (RUNS, cache.runs, {}),
            (JOBS, cache.jobs, {"labelSelector": CHILDREN}),
            (PODS, cache.pods, {"labelSelector": CHILDREN}),
        )
        self._behind: dict[str, int] = {}
        self._missing: set[str] = set()

    async def check(self) -> bool:
        """Whether the cache agrees with the API server.

        Raises ApiError if the API server does not answer: then nothing is known and nothing is concluded. The same
        holds, without an error, for one kind in a namespace where listing it is refused; `namespaces` knows why.
        """
        behind: dict[str, int] = {}
        missing: set[str] = set()
        for kind, shelf, query in self._shelves:
            before = shelf.uids()
            there, refused = await self._versions(kind, query)
            behind |= {uid: version for uid, version in there.items() if (shelf.version(uid) or 0) < version}
            missing |= {uid for uid, (namespace, _) in before.items() if namespace not in refused} - there.keys()
        self._drop(self._missing & missing)
        self._missing = missing
        # The cache still lacks a version that it should have had one check ago.
        stale = [uid for uid, version in self._behind.items() if uid in behind and self._version(uid) < version]
        self._behind = behind
        if not stale:
            self._health.stalled_since = None
        elif self._health.stalled_since is None:
            self._health.stalled_since = self._health.clock()
            _log.warning("watching is behind the API server on %d objects", len(stale))
        return not behind and not missing

    async def _versions(self, kind: Kind, query: dict[str, str]) -> tuple[dict[str, int], set[str]]:
        """Versions by uid, and the namespaces in which the list was refused."""
        found, refused = {}, set()
        for namespace in self._namespaces:
            try:
                async for item in self._api.list(kind, namespace, query, metadata_only=True):
                    head = item["metadata"]
                    found[head["uid"]] = read_version(head.get("resourceVersion"))
            except ApiError as error:
                if error.status != 403 or namespace is None:
                    raise
                refused.add(namespace)
        return found, refused

    def _version(self, uid: str) -> int:
        return max((shelf.version(uid) or 0 for _, shelf, _ in self._shelves), default=0)

    def _drop(self, uids: set[str]) -> None:
        for uid in uids:
            for _, shelf, _ in self._shelves:
                key = shelf.drop(uid)
                if key is not None:
                    self._changed(key)
