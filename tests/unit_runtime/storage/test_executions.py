"""Who may write: claims, heartbeats, take-overs, and holders that die."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.faulty_store import FakeClock, FaultyBackend, faulty_store

from orbit_runtime.errors import OutputError, StorageError
from orbit_runtime.storage import claim_execution, newest_execution, open_store, write_bundle
from orbit_runtime.storage.execution import STALE_SECONDS, ExecutionRecord, Heartbeat, is_live
from orbit_runtime.storage.process import Process, current_process, is_gone

ROOT = Path(__file__).parents[3]
ELSEWHERE = Process("other-host", "boot-b", "pid:[2]", 7, 99)
HOLDER = """
import os, sys, time
from orbit_runtime.storage import claim_execution, open_store
execution = claim_execution(open_store(sys.argv[1]), run_name="holder")
execution.start_heartbeat()
read, write = os.pipe()
child = os.fork() if sys.argv[2] == "fork" else 1
if child == 0:
    os.close(1)
    os.write(write, b".")  # what a process does after a fork has run: a parent killed before it would prove nothing
    time.sleep(60)
    os._exit(0)
if child != 1:
    os.read(read, 1)
print(execution.number, child, flush=True)
time.sleep(60)
"""


def start_holder(uri: str, how: str = "alone") -> tuple[subprocess.Popen[str], int, int]:
    """A process that claims and stays; its execution number, and its child's pid."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, uri, how], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    number, child = process.stdout.readline().split()
    return process, int(number), int(child)


@pytest.fixture
def holders() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_a_live_process_keeps_others_out_and_a_killed_one_none(
    tmp_path: Path, holders: list[subprocess.Popen[str]]
) -> None:
    holder, number, _ = start_holder(str(tmp_path))
    holders.append(holder)
    assert number == 1
    with pytest.raises(OutputError, match=rf"execution 1 \(pid {holder.pid} on host") as caught:
        claim_execution(open_store(str(tmp_path)), run_name="r")
    assert caught.value.exit_code == 73
    assert "--out" in str(caught.value.fix)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    execution = claim_execution(open_store(str(tmp_path)), run_name="r")
    assert execution.number == 2
    execution.release("done")


def test_a_forked_child_that_outlives_its_killed_parent_does_not_keep_the_lock(
    tmp_path: Path, holders: list[subprocess.Popen[str]]
) -> None:
    holder, _, child = start_holder(str(tmp_path), "fork")
    holders.append(holder)
    try:
        with pytest.raises(OutputError, match="in use"):
            claim_execution(open_store(str(tmp_path)), run_name="r")
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        claim_execution(open_store(str(tmp_path)), run_name="r").release("done")
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_spawned_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    execution = claim_execution(open_store(str(tmp_path)), run_name="r")
    worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    worker.start()
    try:
        execution.release("done")
        claim_execution(open_store(str(tmp_path)), run_name="r").release("done")
    finally:
        worker.kill()
        worker.join()


def test_of_processes_that_start_at_once_exactly_one_wins(tmp_path: Path) -> None:
    script = (
        "import sys; from orbit_runtime.errors import OutputError; from orbit_runtime.storage import *\n"
        "store = open_store(sys.argv[1]); print('ready', flush=True); sys.stdin.readline()\n"
        "try: print(claim_execution(store, run_name='r').number, flush=True)\n"
        "except OutputError: print(0, flush=True)\n"
        "sys.stdin.readline()"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(4)
    ]  # fmt: skip
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    numbers = sorted(int(racer.stdout.readline()) for racer in racers if racer.stdout)
    for racer in racers:
        racer.communicate("end\n")
    assert numbers == [0, 0, 0, 1]


def test_a_claim_that_another_one_overtakes_is_refused() -> None:
    """Both saw an empty folder; the other one's record arrives first."""
    clock, backend = FakeClock(), FaultyBackend()
    store = faulty_store(backend, clock)

    def overtake(key: str) -> None:
        del backend.hooks["put"]
        claim_execution(store, run_name="r", clock=clock, process=ELSEWHERE)

    backend.hooks["put"] = overtake
    with pytest.raises(OutputError, match=r"in use by execution 1 .* on host other-host"):
        claim_execution(store, run_name="r", clock=clock)


def test_a_holder_of_the_lock_keeps_the_folder_however_old_its_last_sign_of_life(tmp_path: Path) -> None:
    """A stopped process (SIGSTOP, a laptop asleep) may wake up."""
    execution = claim_execution(open_store(str(tmp_path)), run_name="r", process=ELSEWHERE)
    with pytest.raises(OutputError, match="in use by execution 1") as caught:
        claim_execution(open_store(str(tmp_path)), run_name="r", clock=lambda: time.time() + 1000)
    assert "start again in" not in str(caught.value.fix)
    execution.release("done")


def test_an_expired_heartbeat_of_another_host_is_taken_over_and_the_older_refused() -> None:
    clock = FakeClock()
    store = faulty_store(FaultyBackend(), clock)
    old = claim_execution(store, run_name="r", clock=clock, process=ELSEWHERE)
    clock.sleep(40)
    old.beat()
    clock.sleep(STALE_SECONDS - 1)
    with pytest.raises(OutputError, match=r"last sign of life 44 s ago") as caught:
        claim_execution(store, run_name="r", clock=clock)
    assert "start again in 1 s" in str(caught.value.fix)
    old.check()
    clock.sleep(1)
    assert claim_execution(store, run_name="r", clock=clock).number == 2
    with pytest.raises(OutputError, match="taken over by execution 2"):
        old.check()


def test_a_killed_process_of_this_host_is_followed_at_once_without_a_lock() -> None:
    clock = FakeClock()
    store = faulty_store(FaultyBackend(), clock)
    dead = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = current_process()
    ticks = int(Path(f"/proc/{dead.pid}/stat").read_text().rpartition(")")[2].split()[19])
    gone = replace(here, pid=dead.pid, start_ticks=ticks)
    claim_execution(store, run_name="r", clock=clock, process=gone)
    with pytest.raises(OutputError, match="in use"):
        claim_execution(store, run_name="r", clock=clock)
    dead.kill()
    time.sleep(0.1)
    assert is_gone(gone, here), "a zombie writes nothing"
    dead.communicate()
    assert claim_execution(store, run_name="r", clock=clock).number == 2


def test_a_reused_pid_is_another_process_and_another_namespace_proves_nothing() -> None:
    here = current_process()
    assert not is_gone(here, here)
    assert is_gone(replace(here, start_ticks=1), here)
    for doubt in ({"host": "x"}, {"boot_id": "x"}, {"pid_namespace": "x"}, {"boot_id": None}, {"start_ticks": None}):
        assert not is_gone(replace(here, **{"start_ticks": 1, **doubt}), here)


def test_the_lock_is_proof_on_its_own_host_only() -> None:
    here = Process("h", None, None, 1, None)
    record = ExecutionRecord(1, "r", here, True, 100.0, None, "n")
    beat = Heartbeat(100.0, "live")
    assert not is_live(record, beat, here, 101.0, locked=True)
    assert is_live(record, beat, here, 101.0, locked=False)
    assert is_live(replace(record, locked=False), beat, here, 101.0, locked=True)
    assert is_live(replace(record, process=ELSEWHERE), beat, here, 101.0, locked=True)
    assert not is_live(record, Heartbeat(100.0, "ended", "done"), here, 101.0, locked=False)
    assert is_live(record, None, here, 100.0 + STALE_SECONDS - 1, locked=False)
    assert not is_live(record, None, here, 100.0 + STALE_SECONDS, locked=False)


def test_an_operator_takes_over_a_locked_folder_and_says_who(tmp_path: Path) -> None:
    old = claim_execution(open_store(str(tmp_path)), run_name="r")
    new = claim_execution(open_store(str(tmp_path)), run_name="r", takeover=True, attempt="r-a2")
    assert (new.number, new.record.attempt, new.record.locked) == (2, "r-a2", False)
    with pytest.raises(OutputError, match="taken over by execution 2"):
        old.check()
    old.release("taken over")
    with pytest.raises(OutputError, match="in use by execution 2"):
        claim_execution(open_store(str(tmp_path)), run_name="r")


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_folder_that_was_taken_away_is_noticed_and_never_made_anew(tmp_path: Path, is_replaced: bool) -> None:
    folder = tmp_path / "run"
    store = open_store(str(folder))
    execution = claim_execution(store, run_name="r")
    shutil.move(folder, tmp_path / "elsewhere")
    if is_replaced:
        claim_execution(open_store(str(folder)), run_name="r")
    for write in (
        execution.check,
        execution.beat,
        lambda: store.put("rollouts/a", b""),
        lambda: store.put_stream("adapters/a", lambda: [b"a"]),
        lambda: write_bundle(store, execution, "checkpoints/step-000001", {"a": b"a"}, {}),
    ):
        with pytest.raises(StorageError, match=r"moved or replaced .* executions/000001\.json is gone"):
            write()
    execution.release("failed")
    assert {path.name for path in folder.rglob("*")} <= {"executions", "000001.json", ".lock"}
    assert folder.exists() == is_replaced


@pytest.mark.timeout(60)
def test_a_folder_in_the_place_of_a_record_is_named_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "executions" / "000001.json").mkdir(parents=True)
    with pytest.raises(OutputError, match=r"executions/000001\.json is there, and is not the record"):
        claim_execution(open_store(str(tmp_path)), run_name="r")


def test_the_heartbeat_thread_writes_at_once_and_release_says_how_it_ended(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    execution = claim_execution(store, run_name="r")
    execution.start_heartbeat()
    until = time.monotonic() + 5
    while not store.exists("executions/000001.heartbeat.json") and time.monotonic() < until:
        time.sleep(0.01)
    assert json.loads(store.get("executions/000001.heartbeat.json"))["state"] == "live"
    execution.release("done")
    execution.release("done again")
    found = newest_execution(store)
    assert found is not None
    assert found[1] is not None
    assert (found[0].execution, found[1].state, found[1].reason) == (1, "ended", "done")


def test_a_store_that_is_down_at_the_end_does_not_fail_the_run() -> None:
    clock = FakeClock()
    backend = FaultyBackend()
    execution = claim_execution(faulty_store(backend, clock), run_name="r", clock=clock)
    backend.fail("put", 1000)
    execution.release("done")
    assert sum(clock.slept) <= 10


def test_a_garbled_record_does_not_lock_the_folder_for_ever() -> None:
    clock = FakeClock()
    store = faulty_store(FaultyBackend(), clock)
    store.put("executions/000007.json", b"{not json")
    assert claim_execution(store, run_name="r", clock=clock).number == 8


def test_a_start_removes_what_a_killed_writer_left_half_written(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("checkpoints/step-1/a.bin", b"x")
    (tmp_path / "checkpoints/step-1/b.bin#1").write_bytes(b"half")
    claim_execution(store, run_name="r").release("done")
    assert sorted(path.name for path in (tmp_path / "checkpoints/step-1").iterdir()) == ["a.bin"]


def test_a_taken_over_execution_that_wakes_between_check_and_manifest_does_not_replace() -> None:
    """The new one wrote its manifest meanwhile: the create-only put of the old one meets it."""
    clock, backend = FakeClock(), FaultyBackend()
    store = faulty_store(backend, clock)
    old = claim_execution(store, run_name="r", clock=clock)

    def take_over(key: str) -> None:
        if key.endswith("manifest.json"):
            del backend.hooks["put"]
            new = claim_execution(store, run_name="r", clock=clock, takeover=True)
            write_bundle(store, new, "checkpoints/step-1", {"a.bin": b"new"}, {"by": "new"})

    backend.hooks["put"] = take_over
    with pytest.raises(OutputError, match="execution 2 wrote this bundle"):
        write_bundle(store, old, "checkpoints/step-1", {"a.bin": b"old"}, {"by": "old"})
    assert json.loads(store.get("checkpoints/step-1/manifest.json"))["execution"] == 2


def test_a_live_run_on_a_host_whose_clock_is_ahead_keeps_its_folder() -> None:
    backend, clock, ahead = FaultyBackend(), FakeClock(), FakeClock(1_000_600.0)
    other = claim_execution(faulty_store(backend, ahead), run_name="r", clock=ahead, process=ELSEWHERE)
    for _ in range(3):
        for each in (clock, ahead):
            each.sleep(STALE_SECONDS - 1)
        other.beat()
        with pytest.raises(OutputError, match="in use by execution 1"):
            claim_execution(faulty_store(backend, clock), run_name="r", clock=clock)
        other.check()


def test_a_live_run_on_a_host_whose_clock_is_behind_may_be_taken_over_and_then_writes_nothing_more() -> None:
    """The fence, not the clock, keeps two executions from writing one folder."""
    backend, clock, behind = FaultyBackend(), FakeClock(), FakeClock(1_000_000.0 - 600)
    other = claim_execution(faulty_store(backend, behind), run_name="r", clock=behind, process=ELSEWHERE)
    other.beat()
    newer = claim_execution(faulty_store(backend, clock), run_name="r", clock=clock)
    assert newer.number == 2
    for _ in range(2):
        with pytest.raises(OutputError, match="taken over by execution 2"):
            other.check()
    newer.check()


def test_a_first_execution_that_is_withdrawn_leaves_no_folder_behind(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mistake"
    execution = claim_execution(open_store(str(folder)), run_name="r")
    execution.start_heartbeat()
    execution.withdraw("DataError")
    execution.release("DataError")
    assert not folder.exists()
    assert claim_execution(open_store(str(folder)), run_name="r").number == 1


def test_what_else_a_folder_holds_stays_and_so_does_the_record_of_who_wrote(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    execution = claim_execution(store, run_name="r")
    store.put("run.json", b"{}")
    execution.withdraw("DataError")
    assert store.exists("run.json")
    found = newest_execution(store)
    assert found is not None
    assert (found[0].execution, found[1] and found[1].reason) == (1, "DataError")
    second = claim_execution(store, run_name="r")
    second.withdraw("DataError")
    assert store.exists("executions/000002.heartbeat.json")


def test_a_users_own_file_in_the_folder_survives_a_withdrawn_execution(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    claim_execution(open_store(str(folder)), run_name="r").withdraw("DataError")
    assert (folder / "notes.txt").read_text() == "mine"
