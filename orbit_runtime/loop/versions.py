"""Policy versions that the engine holds: which one samples, and when the slot of its predecessor is freed.

Belongs here: activating and retiring. Does not belong here: publishing and proving (`publish`), moving requests in
flight to a new version (`asking`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orbit_runtime.errors import GateError
from orbit_runtime.loop.publish import Publication
from orbit_runtime.types import Engine


@dataclass
class PolicyVersions:
    """Not thread-safe. A version is added proven, activated, and unloaded when its successor is activated."""

    engine: Engine
    _active: Publication | None = field(default=None)

    @property
    def active(self) -> Publication:
        if self._active is None:
            raise GateError("no policy version was published yet", where="publish")
        return self._active

    def activate(self, publication: Publication) -> None:
        """Activates it and unloads its predecessor, which nothing may sample from any more.

        Raises:
            GateError: it is not newer than the active one. A policy never goes back.
        """
        before, version = self._active, publication.adapter.version
        if before is not None and version <= before.adapter.version:
            raise GateError(
                f"version {version} would replace {before.adapter.version}: versions only grow", where="publish"
            )
        # Switch before unloading: a version whose slot could not be freed is not sampled from either.
        self._active = publication
        if before is not None:
            self.engine.unload_adapter(before.name)
