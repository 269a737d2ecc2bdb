"""kopf, told to keep nothing of objects: no copy to compare with, no progress.

Belongs here: two storages that store nothing. Does not belong here: the other settings (`handlers`).
We handle events alone. Left to itself, kopf would copy every object twice for each of them, for a comparison nobody
asks for: a third of all its time.
"""

from __future__ import annotations

from typing import Any

import kopf


class NoDiffBase(kopf.DiffBaseStorage):
    """Every object is as empty as it was before."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


class NoProgress(kopf.ProgressStorage):
    """No handler is ever under way."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None

    def purge(self, **_: Any) -> None:
        return None

    def touch(self, **_: Any) -> None:
        return None

    def clear(self, *, essence: Any) -> Any:
        return essence
