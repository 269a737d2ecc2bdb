"""What happens inside a rank, without Ray: failures in words, notes, stacks."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orbit_runtime.errors import DivergedError, OutOfMemoryError, OutputError, StorageError
from orbit_runtime.workers.ranks.evidence import NodeWatch, process_state
from orbit_runtime.workers.ranks.node import check_disk, check_ports, check_shared_memory, port_block
from orbit_runtime.workers.ranks.rank import RankNote, collective_of, describe, read_note


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (DivergedError("the loss is NaN"), "DivergedError"),
        (MemoryError(), "OutOfMemoryError"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "OutOfMemoryError"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "GPUFaultError"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer"), "CollectiveError"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), "StorageError"),
        (ValueError("odd"), "InternalError"),
        (SystemExit(3), "InternalError"),
    ],
)
def test_an_exception_of_a_rank_says_who_must_act(error: BaseException, name: str) -> None:
    told = describe(error)
    assert told.error == name
    assert pickle.loads(pickle.dumps(told)) == told


def test_a_collective_is_found_in_a_traceback_and_in_a_dump_of_stacks() -> None:
    place = "/x/torch/distributed/distributed_c10d.py"
    trace = (
        f'  File "/x/torch/distributed/c10d_logger.py", line 83, in wrapper\n  File "{place}", line 2, in all_gather\n'
    )
    dump = f'Current thread 0x1 (most recent call first):\n  File "{place}", line 3012 in all_reduce\n'
    assert collective_of(trace) == "all_gather"
    assert collective_of(dump) == "all_reduce"
    assert collective_of("nothing of the kind") is None


RANK = """
import sys, time
from orbit_runtime.workers.ranks.rank import in_collective, note
from orbit_runtime.workers.ranks.rank import RankActor
rank = RankActor(0, sys.argv[1])
note(stage="train", step=4)
def wait_for_others():
    with in_collective("all_reduce"):
        print("waiting", flush=True)
        time.sleep(600)
wait_for_others()
"""


def test_a_rank_is_seen_from_outside_while_it_waits_is_stopped_and_gone(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", RANK, tmp_path], env={**os.environ, "PYTHONPATH": os.getcwd()})
    try:
        log = tmp_path / "rank-0.log"
        while not (log.exists() and "waiting" in log.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        watch, ranks = NodeWatch(str(tmp_path)), {0: process.pid}
        seen = watch.look_back(ranks)[0]
        assert (seen.note.stage, seen.note.step, seen.collective) == ("train", 4, "all_reduce")
        assert "wait_for_others" in seen.stacks
        assert seen.log == ("waiting",)
        process.send_signal(19)
        while process_state(process.pid) != "T":
            time.sleep(0.01)
        assert watch.glance(ranks)[0].state == "T"
        assert watch.look_back(ranks)[0].stacks == ""
        watch.kill([process.pid])
        assert process.wait(10) == -9
        assert watch.glance(ranks)[0].state is None
        assert watch.glance(ranks)[0].note.step == 4
    finally:
        process.kill()
        process.wait()


def test_the_kernels_count_of_kills_for_memory_is_compared_with_that_at_the_start(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("oom 1\noom_kill 1\n")
    watch = NodeWatch(str(tmp_path), str(events))
    assert not watch.look_back({0: os.getpid() + (1 << 22)})[0].was_short_of_memory
    events.write_text("oom 2\noom_kill 2\n")
    assert watch.look_back({0: os.getpid() + (1 << 22)})[0].was_short_of_memory


def test_a_file_that_holds_no_note_is_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "cut").write_text('{"stage": "tr')
    assert read_note(tmp_path / "cut") == read_note(tmp_path / "none") == RankNote()


def test_two_groups_never_share_a_port() -> None:
    (first, lock), (second, other) = port_block(8), port_block(8)
    try:
        assert first[1] < second[0] or second[1] < first[0]
        assert 20_000 <= min(first + second) < max(first + second) < 32_768
        check_ports(first)
    finally:
        os.close(lock)
        os.close(other)


def test_a_full_disk_and_a_full_shared_memory_are_found_before_anything_starts() -> None:
    # /proc is a file system without a free block.
    with pytest.raises(StorageError, match="the disk is full"):
        check_disk(Path("/proc"))
    with pytest.raises(OutOfMemoryError, match="/proc has 0 MiB free"):
        check_shared_memory("/proc")


def test_a_range_with_a_port_in_use_names_it() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OutputError, match=f"port {port} of"):
            check_ports((port, port))
