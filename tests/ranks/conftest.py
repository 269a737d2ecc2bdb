"""What every test of ranks must leave behind: nothing."""

from __future__ import annotations

import os
import tempfile
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
    """Files that Ray, torch and gloo leave in /dev/shm, and that nobody has open: those of other runs are in use."""
    names = {
        each.name for each in Path("/dev/shm").iterdir() if each.name.startswith(("plasma", "ray", "torch", "gloo"))
    }
    return names - in_use() if names else names


def in_use() -> set[str]:
    """Names in /dev/shm of what any living process has open or mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found |= {Path(line.split()[5]).name for line in (process / "maps").open() if "/dev/shm/" in line}
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    if "/dev/shm/" in (target := os.readlink(link)):
                        found.add(Path(target).name)
    return found


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], dict[int, str]]]:
    """Tells the living processes of this test; afterwards there must be none, and no file of theirs.

    The temporary folder is the test's own, so that what another run of these tests leaves there is not taken for its.
    pytest's own comes first, since it lies where temporary files go when the first test asks for it.
    Its name is short: that of a session of Ray is part of a socket's.
    """
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    before = shared_memory()
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield lambda: marked_processes(mark)
        until = time.monotonic() + 20
        # One whose holder was killed is ended by its guard.
        while marked_processes(mark) and time.monotonic() < until:
            time.sleep(0.1)
        assert marked_processes(mark) == {}
        assert shared_memory() - before == set()
        assert [each.name for each in Path(folder).glob("orbit-ray-*")] == []
