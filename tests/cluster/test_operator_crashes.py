"""The operator as a process against a real API server and the real Job controller, killed at every call it makes."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import TimeoutExpired

import pytest
from cluster.bed.control_plane import ControlPlane
from cluster.by_hand import Server, Team, connect, open_team, wait_for
from cluster.operator_process import Operator, run_operator

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def server(control_plane: ControlPlane) -> Server:
    return connect(control_plane.kubeconfig)


def live(team: Team) -> None:
    """A run's whole life: it starts, is suspended, is resumed, and ends well."""
    team.exits = {2: 0}
    team.start_run("adder")
    team.wait_phase("adder", "Starting", "Running")
    team.edit_run("adder", lifecycle={"suspend": True})
    team.wait_phase("adder", "Suspended")
    team.edit_run("adder", lifecycle={"suspend": False})
    team.wait_phase("adder", "Succeeded")


def check(team: Team) -> None:
    """What is true of that life however often the operator died in it."""
    status = team.status("adder")
    assert team.jobs() == ["adder-a1", "adder-a2"]
    assert [attempt["number"] for attempt in status["attempts"]] == [1, 2]
    assert [attempt["ending"]["result"] for attempt in status["attempts"]] == ["Stopped", "Succeeded"]
    assert (status["freeRestarts"], status["infraRestarts"], status["userRetries"]) == (1, 0, 0)
    assert max(len(pods) for pods in team.history) == 1, team.history
    assert {"RunSuspended", "RunSucceeded"} <= set(team.events())
    assert team.events().count("RunAttemptCreated") == 2, "one of each attempt, also where its maker died"


def count_calls(server: Server, folder: Path) -> int:
    """Writes in an undisturbed life; the same life is then cut at each of them."""
    with (
        open_team(server, "crash-none") as team,
        run_operator(team, folder / "none.log", ORBIT_TEST_CRASH="never:0") as operator,
    ):
        live(team)
        check(team)
        time.sleep(0.5)
        return max(int(number) for number in re.findall(r"^CALL (\d+) ", operator.text, re.MULTILINE))


def live_with_a_crash(server: Server, folder: Path, crash: str) -> bool:
    """Whether the life was long enough to be cut there: two lives differ by a call or two."""
    name = "crash-" + crash.replace(":", "-")
    with open_team(server, name) as team:
        first = Operator(team, folder / f"{name}-1.log", ORBIT_TEST_CRASH=crash)
        with ThreadPoolExecutor(1) as user:
            life = user.submit(live, team)
            wait_for(lambda: first.process.poll() is not None or life.done(), f"{name}: the crash", 240)
            try:
                first.process.wait(3)
            except TimeoutExpired:
                first.kill()
                return False
            assert first.process.returncode == 137, f"{name}: {first.process.returncode}: {first.text[-2000:]}"
            with run_operator(team, folder / f"{name}-2.log") as second:
                try:
                    life.result(240)
                    check(team)
                except AssertionError as error:
                    raise AssertionError(f"{name}: {error}\n{first.text[-1500:]}\n{second.text[-1500:]}") from None
    return True


def test_killed_before_and_after_every_call_the_run_ends_the_same(server: Server, tmp_path: Path) -> None:
    """Between two calls nothing lives but the process: dying after one is dying before the next."""
    calls = count_calls(server, tmp_path)
    assert calls >= 8
    points = ["before:1", *(f"after:{number}" for number in range(1, calls + 1))]
    with ThreadPoolExecutor(3) as pool:
        cut = [pool.submit(live_with_a_crash, server, tmp_path, point).result for point in points]
        assert sum(result() for result in cut) >= len(points) - 4
