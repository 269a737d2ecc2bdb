"""Policy versions that stand in the engine: which one samples, and when its predecessor's slot is given back.

Belongs here: activating and retiring. Does not belong here: publishing and proving (`publish`), moving what is sampled
to a new version (`asking`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orbit_runtime.errors import GateError
from orbit_runtime.loop.publish import Publication
from orbit_runtime.types import Engine


@dataclass
class PolicyVersions:
    """For one thread. A version is added proven, made the active one, and leaves when its successor is."""

    engine: Engine
    _active: Publication | None = field(default=None)

    @property
    def active(self) -> Publication:
        if self._active is None:
            raise GateError("no policy version was published yet", where="publish")
        return self._active

    def activate(self, publication: Publication) -> None:
        """Its predecessor leaves the engine: nothing may sample from that any more.

        Raises:
            GateError: it is not newer than the active one. A policy never goes back.
        """
        before, version = self._active, publication.adapter.version
        if before is not None and version <= before.adapter.version:
            raise GateError(
                f"version {version} would replace {before.adapter.version}: versions only grow", where="publish"
            )
        # Out of here first: a version whose slot could not be given back is not sampled from either.
        self._active = publication
        if before is not None:
            self.engine.unload_adapter(before.name)
