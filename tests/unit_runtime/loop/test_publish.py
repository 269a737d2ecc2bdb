"""What is kept beside the next step: in order, one thing at a time, and nothing after a failure. Which version samples,
and when its predecessor goes.
"""

from __future__ import annotations

import threading

import pytest

from orbit_runtime.errors import GateError, StorageError
from orbit_runtime.loop.publish import BackgroundWriter, PolicyVersions, Publication
from orbit_runtime.storage import CheckpointParts
from orbit_runtime.types import AdapterFiles


def test_work_is_done_in_its_order_beside_the_caller() -> None:
    keeper, go, done = BackgroundWriter(), threading.Event(), []
    keeper.submit(lambda: (go.wait(), done.append("adapter")))
    keeper.submit(lambda: done.append("checkpoint"))
    assert done == [], "the caller did not wait"
    go.set()
    keeper.wait()
    assert done == ["adapter", "checkpoint"]
    keeper.close()


def test_after_a_failure_nothing_more_is_written_and_it_is_raised_once() -> None:
    keeper, done = BackgroundWriter(), []

    def full() -> None:
        raise StorageError("the disk is full")

    keeper.submit(full)
    keeper.submit(lambda: done.append("checkpoint"))
    with pytest.raises(StorageError, match="full"):
        keeper.wait()
    keeper.wait()
    keeper.submit(lambda: done.append("the next adapter"))
    keeper.wait()
    keeper.close()
    assert done == [], "a checkpoint whose adapter is not stored must not exist"


def test_a_trainer_is_not_kept_waiting_by_a_checkpoint_that_is_never_begun() -> None:
    keeper, parts, go = BackgroundWriter(), CheckpointParts("checkpoints/step-000001"), threading.Event()

    def full() -> None:
        go.wait()
        raise StorageError("the disk is full")

    keeper.submit(full)
    keeper.submit(lambda: None).add_done_callback(lambda _: parts.is_read.set())
    assert not parts.is_read.is_set()
    go.set()
    parts.wait()
    keeper.close()


def test_closing_finishes_what_was_begun() -> None:
    keeper, go, done = BackgroundWriter(), threading.Event(), []
    keeper.submit(lambda: (go.wait(), done.append("adapter")))
    threading.Timer(0.05, go.set).start()
    keeper.close()
    assert done == ["adapter"]
    keeper.close()


def test_a_third_piece_of_work_would_pile_up() -> None:
    keeper, go = BackgroundWriter(), threading.Event()
    keeper.submit(go.wait)
    keeper.submit(go.wait)
    with pytest.raises(AssertionError, match="not durable yet"):
        keeper.submit(go.wait)
    go.set()
    keeper.close()


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
