"""What a rank, its driver and its guard may do and are bound by, beside the table of the other kinds of children."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from orbit_runtime.workers.child.process import descendants
from orbit_runtime.workers.ranks.group import GroupSettings, start_ranks
from orbit_runtime.workers.ranks.guard import MARK


def test_a_rank_is_free_and_its_guard_hears_no_signal_but_the_last(tmp_path: Path) -> None:
    group = GroupSettings("ranks.targets:Probed", {}, 1, environment={"OWN": "1"}, rendezvous=False)
    with start_ranks(group, tmp_path) as ranks:
        (first,), (second,) = ranks.call("look", os.getpid()), ranks.call("look", os.getpid())
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{ranks.guard_pid}/status").read_text().splitlines())
        ignored = {number for number in range(1, 32) if int(status["SigIgn"], 16) >> (number - 1) & 1}
        (driver,) = (each for each in descendants(ranks.guard_pid) if b"ranks.driver" in command(each))
        assert os.getsid(ranks.guard_pid) == ranks.guard_pid
        assert os.getsid(driver) == ranks.guard_pid
        streams = [os.readlink(f"/proc/{pid}/fd/{each}") for pid in (ranks.guard_pid, driver) for each in range(3)]
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGHUP} <= ignored
    assert streams == ["/dev/null", *[str(tmp_path / "ray.log")] * 2] * 2
    assert (first.pop("calls"), second["calls"]) == (1, 2)
    given = first.pop("environment")
    assert given["OWN"] == "1"
    assert (given["RANK"], given["WORLD_SIZE"], given["LOCAL_RANK"]) == ("0", "1", "0")
    assert Path(given[MARK]).name.startswith("orbit-ray-")
    assert "MASTER_ADDR" not in given
    del first["limits"], first["hands on"], first["ignores"], first["own group"]  # Ray's affair
    assert first == {
        "seccomp": False, "no new privileges": False, "dumpable": True, "dies with its parent": False,
        "reaps orphans": False, "own session": False, "tells stacks": True,
        "streams": ["device", "file", "file"], "forks": True, "opens sockets": True, "reads files": True,
        "signals the run": True,
    }  # fmt: skip


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
