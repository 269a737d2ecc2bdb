"""Policy versions in the engine: which is active, which are kept, which have left."""

from __future__ import annotations

import pytest

from orbit_runtime.errors import GateError
from orbit_runtime.loop.publish import Publication
from orbit_runtime.loop.versions import PolicyVersions
from orbit_runtime.types import AdapterFiles


class Slots:
    """An engine, as far as versions are concerned."""

    def __init__(self) -> None:
        self.unloaded: list[str] = []

    def unload_adapter(self, name: str) -> None:
        self.unloaded.append(name)


def published(version: int) -> Publication:
    return Publication(AdapterFiles(version, {}, f"sha256:{version}"), (), ())


def build(kept: int = 1) -> tuple[PolicyVersions, list[str]]:
    engine = Slots()
    return PolicyVersions(engine, kept), engine.unloaded  # type: ignore[arg-type]


def test_an_unused_predecessor_leaves_when_its_successor_becomes_active() -> None:
    versions, unloaded = build()
    versions.activate(published(0))
    assert (versions.active.name, unloaded) == ("policy-v0", [])
    versions.activate(published(1))
    assert (versions.active.name, unloaded) == ("policy-v1", ["policy-v0"])


def test_a_version_that_is_sampled_from_stays_until_it_is_drained() -> None:
    versions, unloaded = build()
    versions.activate(published(0))
    with versions.using() as first:
        versions.activate(published(1))
        with versions.using() as second, versions.using():
            versions.activate(published(2))
            assert (first.adapter.version, second.adapter.version) == (0, 1)
            assert versions.standing == (0, 1, 2)
        assert unloaded == ["policy-v1"]
    assert unloaded == ["policy-v1", "policy-v0"]
    assert versions.standing == (2,)


def test_as_many_newest_versions_stay_as_the_staleness_allows() -> None:
    versions, unloaded = build(kept=3)
    for version in range(6):
        versions.activate(published(version))
    assert versions.standing == (3, 4, 5)
    assert unloaded == ["policy-v0", "policy-v1", "policy-v2"]


def test_versions_only_grow_and_the_first_must_be_there() -> None:
    versions, _ = build()
    with pytest.raises(GateError, match="no policy version"):
        versions.active  # noqa: B018
    versions.activate(published(4))
    for version in (4, 3):
        with pytest.raises(GateError, match="only grow"):
            versions.activate(published(version))
