"""The collector of cycles rests while a run loads, and afterwards nothing is lost to it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from orbit_runtime.workers.garbage_collection import gc_paused, unfreeze_objects


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    gc.enable()
    gc.unfreeze()
    yield
    gc.enable()
    gc.unfreeze()


def num_collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def test_nothing_is_collected_meanwhile_and_all_at_the_end() -> None:
    with gc_paused():
        before = num_collections()
        lost = weakref.ref(Cycle())
        kept = [Cycle() for _ in range(100_000)]
        assert num_collections() == before
        assert lost() is not None
    assert lost() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(kept)


def test_what_lives_at_the_end_is_collected_after_the_run() -> None:
    with gc_paused():
        kept = Cycle()
    model = weakref.ref(kept)
    del kept
    gc.collect()
    assert model() is not None, "left alone"
    unfreeze_objects()
    gc.collect()
    assert model() is None


def test_the_outer_block_decides_and_so_does_who_switched_it_off() -> None:
    with gc_paused():
        with gc_paused():
            pass
        assert not gc.isenabled()
        assert gc.get_freeze_count() == 0
    assert gc.isenabled()
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()


def test_it_is_switched_on_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="no model"), gc_paused():
        raise ValueError("no model")
    assert gc.isenabled()
