"""Signs of life of what a run waits for: of a device's work in this process, of ranks in others."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from orbit_runtime.workers.child.heartbeat import device_work, sign, silent_seconds
from orbit_runtime.workers.ranks.driver import SIGN_SECONDS, _Patience


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_end_of_a_piece_of_work_is_a_sign_and_its_failure_is_none(device: str) -> None:
    sign()
    before = time.monotonic()
    with pytest.raises(OSError, match="lost"), device_work("a step", device):
        raise OSError("lost")
    time.sleep(0.05)
    silent = silent_seconds()
    assert silent >= 0.05
    with device_work("a step", device):
        assert silent_seconds() >= silent, "what has begun has shown nothing"
    assert silent_seconds() <= time.monotonic() - before - 0.05


def glance(count: int) -> SimpleNamespace:
    return SimpleNamespace(note=SimpleNamespace(count=count), state="R")


def test_ranks_that_begin_another_layer_are_told_now_and_then() -> None:
    now, told = [0.0], []
    watch = _Patience(60.0, 60.0, lambda: told.append(now[0]), clock=lambda: now[0])
    for seconds, count in ((0.0, 1), (1.0, 2), (SIGN_SECONDS, 3), (20.0, 3), (30.0, 4)):
        now[0] = seconds
        assert not watch.look({0: glance(count), 1: glance(7)}, {0, 1})
    assert told == [0.0, SIGN_SECONDS, 30.0]
    now[0] = 91.0
    assert watch.look({0: glance(4), 1: glance(7)}, {0, 1}), "silence is told by nobody, and ends the call"
    assert len(told) == 3
