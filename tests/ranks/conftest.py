"""What every test of ranks must leave behind: nothing."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

MARK = "ORBIT_TEST_RANKS"


def marked_processes(mark: str) -> dict[int, str]:
    """Every process that has inherited this test's variable, besides the test itself."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (place / "environ").read_bytes() and int(place.name) != os.getpid():
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    return found


def shared_memory() -> set[str]:
    return {
        each.name for each in Path("/dev/shm").iterdir() if each.name.startswith(("plasma", "ray", "torch", "gloo"))
    }


def sessions() -> set[Path]:
    return set(Path("/tmp").glob("orbit-ray-*"))


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], dict[int, str]]]:
    """Tells the living processes of this test; afterwards there must be none, and no file of theirs."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    before = shared_memory(), sessions()
    yield lambda: marked_processes(mark)
    until = time.monotonic() + 20
    # One whose holder was killed is ended by its guard.
    while marked_processes(mark) and time.monotonic() < until:
        time.sleep(0.1)
    assert marked_processes(mark) == {}
    assert shared_memory() - before[0] == set()
    assert sessions() - before[1] == set()
