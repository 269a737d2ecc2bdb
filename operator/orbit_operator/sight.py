"""What may be read now: where the API server refuses to list or watch, nothing is known and nothing is done.

Belongs here: which namespaces are out of sight, and for how long to wait before asking again. Does not belong here:
the refused requests (`session`), or what depends on it (`main`, `resync`).
One namespace whose rights were taken away, or that was deleted, must not keep the others waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

LONGEST_PAUSE = 15.0
_log = logging.getLogger("orbit.operator")


class Sight:
    """For one event loop. A namespace is in sight when each kind of object in it was listed since the last refusal.

    Args:
        changed: told of a namespace that went out of sight (False) or is back, all of it listed (True).
    """

    def __init__(self, changed: Callable[[str, bool], None] = lambda *_: None) -> None:
        self._changed = changed
        self._refused: dict[str, dict[str, int]] = {}

    @property
    def lost(self) -> tuple[str, ...]:
        """Namespaces out of sight."""
        return tuple(sorted(self._refused))

    def sees(self, namespace: str) -> bool:
        return namespace not in self._refused

    def misses(self, namespace: str, plural: str) -> bool:
        """Whether this kind must be listed before it is watched again."""
        return plural in self._refused.get(namespace, ())

    def refuse(self, namespace: str, plural: str, why: str) -> None:
        """The API server refused to list or watch this kind here."""
        news = namespace not in self._refused
        kinds = self._refused.setdefault(namespace, {})
        kinds[plural] = kinds.get(plural, 0) + 1
        if news:
            _log.error(
                "namespace %s cannot be read, so nothing is done for its runs until it can: %s. Give the operator its "
                "Role and RoleBinding there back, or take the namespace out of watchNamespaces",
                namespace, why,
            )  # fmt: skip
            self._changed(namespace, False)

    def list_whole(self, namespace: str, plural: str) -> None:
        """This kind was listed here, to the last page."""
        kinds = self._refused.get(namespace)
        if kinds is None or kinds.pop(plural, None) is None or kinds:
            return
        del self._refused[namespace]
        _log.info("namespace %s can be read again", namespace)
        self._changed(namespace, True)

    def pause(self, namespace: str, plural: str) -> float:
        """Seconds until this kind is asked for again: longer with each refusal."""
        refusals = self._refused.get(namespace, {}).get(plural, 1)
        return min(LONGEST_PAUSE, 0.5 * 2.0 ** min(refusals, 10))
