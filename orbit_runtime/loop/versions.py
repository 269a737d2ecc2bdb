"""Policy versions that stand in the engine: published, active, and retired once nothing samples from them any more.

Belongs here: which version new episodes sample from, who still uses an older one, and when a slot is given back.
Does not belong here: publishing and proving (`publish`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from orbit_runtime.errors import GateError
from orbit_runtime.loop.publish import Publication
from orbit_runtime.types import Engine


@dataclass
class PolicyVersions:
    """For one thread. A version is added proven, made the active one, and leaves when it is old and unused."""

    engine: Engine
    kept: int = 1
    """Newest versions that stay although nothing uses them: how many updates old the policy may be that an episode
    samples from, and the active one. The engine needs a slot more, for the version that is being published."""
    _standing: dict[int, Publication] = field(default_factory=dict)
    _uses: dict[int, int] = field(default_factory=dict)
    _active: int | None = None

    @property
    def active(self) -> Publication:
        if self._active is None:
            raise GateError("no policy version was published yet", where="publish")
        return self._standing[self._active]

    @property
    def standing(self) -> tuple[int, ...]:
        """Versions that the engine holds, oldest first."""
        return tuple(sorted(self._standing))

    def activate(self, publication: Publication) -> None:
        """From now on episodes sample from it; older versions leave as soon as nothing samples from them.

        Raises:
            GateError: it is not newer than the active one. A policy never goes back.
        """
        version = publication.adapter.version
        if self._active is not None and version <= self._active:
            raise GateError(f"version {version} would replace {self._active}: versions only grow", where="publish")
        self._standing[version] = publication
        self._active = version
        self._retire()

    @contextmanager
    def using(self) -> Iterator[Publication]:
        """The active version, which stays in the engine until the end of this, whatever is published meanwhile."""
        publication = self.active
        version = publication.adapter.version
        self._uses[version] = self._uses.get(version, 0) + 1
        try:
            yield publication
        finally:
            self._uses[version] -= 1
            if not self._uses[version]:
                del self._uses[version]
                self._retire()

    def _retire(self) -> None:
        for version in self.standing[: -self.kept]:
            if version not in self._uses:
                # Out of the table first: a version whose slot could not be given back is not sampled from either.
                self.engine.unload_adapter(self._standing.pop(version).name)
