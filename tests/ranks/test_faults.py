"""What can happen to ranks, with real Ray and gloo: one error, its exit code, which rank, and nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orbit_runtime.errors import OrbitError
from orbit_runtime.workers.child.process import descendants
from orbit_runtime.workers.ranks.group import GroupSettings, RankGroup, start_ranks
from orbit_runtime.workers.ranks.guard import MARK
from orbit_runtime.workers.ranks.rank import read_note

pytestmark = pytest.mark.timeout(900)  # a start on two cores that ten others want takes minutes
TARGET = "ranks.targets:Meeting"
ENDLESS = ("stop", "sleep", "return_early")
"""Faults after which a call would not end by itself."""


def start(logs: Path) -> RankGroup:
    return start_ranks(GroupSettings(TARGET, {}, 2, stopped_seconds=2.0), logs)


def patience_for(ranks: RankGroup, fault: str) -> float | None:
    """For an endless fault what a healthy step needs many times over, on this machine as busy as it is now; any other
    ends by itself, and a deadline could only come before it."""
    if fault not in ENDLESS:
        return None
    began = time.monotonic()
    ranks.call("step", 2)
    return round(max(6.0, 20 * (time.monotonic() - began)))


@pytest.mark.parametrize(
    ("fault", "code", "words", "collective"),
    [
        ("kill", 81, "rank 1 (CPU) was killed", None),
        pytest.param("segfault", 81, "Segmentation fault", None, marks=pytest.mark.long),
        ("stop", 83, "rank 1 (CPU) is stopped (SIGSTOP) in stage train, step 3; rank 0 waits in all_reduce", None),
        pytest.param(
            "sleep",
            83,
            "rank 1 (CPU) did not get on within {patience:g} s in stage train, step 3",
            None,
            marks=pytest.mark.long,
        ),
        (
            "return_early",
            81,
            "all_reduce did not end within {patience:g} s in stage train, step 3: rank 1 did not",
            "all_reduce",
        ),
        ("memory", 79, "rank 1 (CPU) in stage train, step 3: memory ran out", None),
        ("nan", 85, "rank 1 (CPU) in stage train, step 3: the loss is NaN", None),
        pytest.param("bug", 70, "ValueError: a planted bug", None, marks=pytest.mark.long),
        pytest.param("unpicklable", 70, "Odd: odd", None, marks=pytest.mark.long),
        pytest.param("disk", 74, "the disk is full", None, marks=pytest.mark.long),
        pytest.param("leave", 70, "SystemExit: 3", None, marks=pytest.mark.long),
    ],
)
def test_a_fault_on_one_rank_ends_all_with_its_code(
    fault: str, code: int, words: str, collective: str | None, tmp_path: Path, marked: Callable[[], dict[int, str]]
) -> None:
    ranks = start(tmp_path)
    patience = patience_for(ranks, fault)
    with pytest.raises(OrbitError) as caught:
        ranks.call("step", 3, fault, patience=patience)
    error = caught.value
    assert (error.exit_code, marked()) == (code, {})
    assert words.format(patience=patience) in str(error)
    named = 0 if fault == "return_early" else 1
    assert error.about["rank"] == named
    assert (error.about["device"], error.about["stage"], error.about["last_step"]) == ("CPU", "train", 3)
    assert collective is None or error.about["collective"] == collective
    if fault in ("stop", "sleep", "return_early"):
        assert "all_reduce" in (tmp_path / "rank-0.stacks").read_text()
    if fault == "bug":
        assert "_bug" in str(error.__cause__)
    with pytest.raises(OrbitError) as again:
        ranks.call("step", 4)
    assert ranks.is_closed
    assert again.value is error, "who asks next may be another thread, which has not been told"


def test_every_process_of_a_group_can_be_found_without_its_guard(
    tmp_path: Path, marked: Callable[[], dict[int, str]]
) -> None:
    """Ray's agents and workers give themselves titles, written over the first variables of their environment: now
    and then the mark was among them. So none may be overwritten."""
    ranks = start(tmp_path)
    environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in descendants(ranks.guard_pid)]
    ranks.close()
    assert len(environments) >= 8
    for each in environments:
        variables = each.rstrip(b"\0").split(b"\0")
        assert all(b"=" in variable for variable in variables), variables[:3]
        assert any(variable.startswith(f"{MARK}=".encode()) for variable in variables)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("gcs_server", "Ray's head (gcs_server) was killed by SIGKILL in stage train, step 1"),
        ("raylet/raylet", "Ray's node agent (raylet) was killed by SIGKILL in stage train, step 1"),
        ("ranks.driver", "the process that holds the ranks (Ray's driver) was lost in stage step"),
        pytest.param(
            "ranks.guard",
            "the process that holds the ranks (Ray's driver) was lost in stage step",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_holds_the_ranks_is_killed(
    program: str, words: str, tmp_path: Path, marked: Callable[[], dict[int, str]]
) -> None:
    ranks = start(tmp_path)
    killer = threading.Thread(target=kill_in_step, args=(ranks, program))
    killer.start()
    with pytest.raises(OrbitError) as caught:
        ranks.call("step", 1, "sleep")
    killer.join()
    assert caught.value.exit_code == 81
    assert words in str(caught.value)


def kill_in_step(ranks: RankGroup, program: str) -> None:
    """Once every rank has noted that it trains, however long it takes to get there."""
    until = time.monotonic() + 120
    while {read_note(ranks.logs / f"rank-{rank}.note").step for rank in range(2)} != {1}:
        assert time.monotonic() < until, "no rank has begun the step"
        time.sleep(0.05)
    kill(ranks.guard_pid, program)


def kill(guard: int, program: str) -> None:
    """The one below the guard, or the guard itself, whose command names the program first."""
    for pid in [guard, *descendants(guard)]:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if any(program in word for word in command[:3]):
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError(program)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
def test_the_end_of_the_run_is_the_end_of_its_ranks(
    number: signal.Signals, tmp_path: Path, marked: Callable[[], dict[int, str]]
) -> None:
    holder = Path(__file__).with_name("holder.py")
    process = subprocess.Popen(
        [sys.executable, holder, tmp_path], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert len(marked()) > 5
    time.sleep(0.5)
    process.send_signal(number)
    assert process.wait(60) == (75 if number == signal.SIGTERM else -signal.SIGKILL)
