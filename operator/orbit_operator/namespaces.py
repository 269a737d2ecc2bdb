"""Namespaces in sight: if listing is incomplete or forbidden, too little is known to act.

A namespace that was deleted, or for which we lost our rights, must not delay the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

EVERYWHERE = ""
"""Stands for all namespaces: the whole cluster is listed at once."""
PLURALS = ("orbitruns", "jobs", "pods")
LONGEST_PAUSE = 15.0
_log = logging.getLogger("orbit.operator")


class NamespaceView:
    """Belongs to one event loop. A namespace is in sight once each kind in it was listed since the last refusal.

    Args:
        changed: called with a namespace that went out of sight (False) or is in sight, completely listed (True).
        places: namespaces of which nothing is known yet, or `EVERYWHERE`.
    """

    def __init__(self, changed: Callable[[str, bool], None] = lambda *_: None, places: Iterable[str] = ()) -> None:
        self._changed = changed
        self._unlisted: dict[str, set[str]] = {place: set(PLURALS) for place in places}
        """Plurals still to be listed, by namespace."""
        self._refused: set[str] = set()
        self._refusals: dict[tuple[str, str], int] = {}
        """Consecutive refusals since the kind was last watched."""

    @property
    def lost(self) -> tuple[str, ...]:
        """Namespaces that the operator may not read."""
        return tuple(sorted(self._refused))

    @property
    def waits(self) -> bool:
        """Whether any list that is not refused is still incomplete."""
        return not self._unlisted.keys() <= self._refused

    def sees(self, namespace: str) -> bool:
        return namespace not in self._unlisted and EVERYWHERE not in self._unlisted

    def misses(self, namespace: str, plural: str) -> bool:
        """Whether this kind must be listed before it is watched again."""
        return plural in self._unlisted.get(namespace, ())

    def refuse(self, namespace: str, plural: str, why: str) -> None:
        """Records that the API server refused to list or watch this kind here."""
        self.expire(namespace, plural)
        self._refusals[namespace, plural] = self._refusals.get((namespace, plural), 0) + 1
        if namespace not in self._refused:
            self._refused.add(namespace)
            _log.error(
                "namespace %s cannot be read, so nothing is done for its runs until it can: %s. Give the operator its "
                "Role and RoleBinding there back, or take the namespace out of watchNamespaces",
                namespace, why,
            )  # fmt: skip
            self._changed(namespace, False)

    def expire(self, namespace: str, plural: str) -> None:
        """Records that the list of this kind here broke off and must be repeated."""
        self._unlisted.setdefault(namespace, set()).add(plural)

    def watch(self, namespace: str, plural: str) -> None:
        """Records that this kind is watched here again."""
        self._refusals.pop((namespace, plural), None)

    def list_whole(self, namespace: str, plural: str) -> None:
        """Records that this kind was listed here to the last page."""
        kinds = self._unlisted.get(namespace)
        if kinds is None:
            return
        kinds.discard(plural)
        if kinds:
            return
        del self._unlisted[namespace]
        if namespace in self._refused:
            self._refused.discard(namespace)
            _log.info("namespace %s can be read again", namespace)
        self._changed(namespace, True)

    def pause(self, namespace: str, plural: str) -> float:
        """Seconds until this kind is requested again: longer with each refusal."""
        return min(LONGEST_PAUSE, 0.5 * 2.0 ** min(self._refusals.get((namespace, plural), 0), 10))
