"""Policy versions in the engine: which is active, which are kept, which have left."""

from __future__ import annotations

import pytest

from orbit_runtime.errors import GateError
from orbit_runtime.loop.publish import PolicyVersions, Publication
from orbit_runtime.types import AdapterFiles


class Slots:
    """An engine, as far as versions are concerned."""

    def __init__(self) -> None:
        self.unloaded: list[str] = []

    def unload_adapter(self, name: str) -> None:
        self.unloaded.append(name)


def published(version: int) -> Publication:
    return Publication(AdapterFiles(version, {}, f"sha256:{version}"), (), ())


def build() -> tuple[PolicyVersions, list[str]]:
    engine = Slots()
    return PolicyVersions(engine), engine.unloaded  # type: ignore[arg-type]


def test_a_predecessor_leaves_when_its_successor_becomes_active() -> None:
    versions, unloaded = build()
    versions.activate(published(0))
    assert (versions.active.name, unloaded) == ("policy-v0", [])
    versions.activate(published(1))
    assert (versions.active.name, unloaded) == ("policy-v1", ["policy-v0"])


def test_versions_only_grow_and_the_first_must_be_there() -> None:
    versions, _ = build()
    with pytest.raises(GateError, match="no policy version"):
        versions.active  # noqa: B018
    versions.activate(published(4))
    for version in (4, 3):
        with pytest.raises(GateError, match="only grow"):
            versions.activate(published(version))
