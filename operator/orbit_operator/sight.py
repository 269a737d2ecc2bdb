"""What can be seen now: where not all was listed yet, or may not be, too little is known and nothing is done.

Belongs here: which namespaces are out of sight, and for how long to wait before asking again. Does not belong here:
the requests (`session`), or what depends on it (`main`, `resync`).
One namespace whose rights were taken away, or that was deleted, must not keep the others waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

EVERYWHERE = ""
"""In place of a namespace: the whole cluster is listed at once."""
PLURALS = ("orbitruns", "jobs", "pods")
LONGEST_PAUSE = 15.0
_log = logging.getLogger("orbit.operator")


class Sight:
    """For one event loop. A namespace is in sight when each kind of object in it was listed since the last refusal.

    Args:
        changed: told of a namespace that went out of sight (False) or is in sight, all of it listed (True).
        places: namespaces that nothing is known of yet, or `EVERYWHERE`.
    """

    def __init__(self, changed: Callable[[str, bool], None] = lambda *_: None, places: Iterable[str] = ()) -> None:
        self._changed = changed
        self._unlisted: dict[str, set[str]] = {place: set(PLURALS) for place in places}
        """What is to be listed there."""
        self._refused: set[str] = set()
        self._refusals: dict[tuple[str, str], int] = {}
        """In a row, since it was watched last."""

    @property
    def lost(self) -> tuple[str, ...]:
        """Namespaces that may not be read."""
        return tuple(sorted(self._refused))

    @property
    def waits(self) -> bool:
        """Whether anything that is not refused has yet to be listed."""
        return not self._unlisted.keys() <= self._refused

    def sees(self, namespace: str) -> bool:
        return namespace not in self._unlisted and EVERYWHERE not in self._unlisted

    def misses(self, namespace: str, plural: str) -> bool:
        """Whether this kind must be listed before it is watched again."""
        return plural in self._unlisted.get(namespace, ())

    def refuse(self, namespace: str, plural: str, why: str) -> None:
        """The API server refused to list or watch this kind here."""
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
        """What was listed of this kind here has no end, and has to be listed anew."""
        self._unlisted.setdefault(namespace, set()).add(plural)

    def watch(self, namespace: str, plural: str) -> None:
        """This kind is watched here again."""
        self._refusals.pop((namespace, plural), None)

    def list_whole(self, namespace: str, plural: str) -> None:
        """This kind was listed here, to the last page."""
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
        """Seconds until this kind is asked for again: longer with each refusal."""
        return min(LONGEST_PAUSE, 0.5 * 2.0 ** min(self._refusals.get((namespace, plural), 0), 10))
