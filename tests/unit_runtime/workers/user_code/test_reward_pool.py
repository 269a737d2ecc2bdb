"""Rewards in processes of their own: outcomes, timeouts that end calls, deaths, start-up errors, orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import bad_rewards

from orbit_runtime.errors import ManifestError
from orbit_runtime.workers.child.process import descendants
from orbit_runtime.workers.user_code.reward_pool import OUTPUT_BYTES, RewardPool, RewardThreads
from orbit_runtime.workers.user_code.reward_protocol import RewardCall, RewardTarget

TESTS = str(Path(__file__).resolve().parents[3])
TARGET = RewardTarget("score", "fakes.bad_rewards:by_text", {"scale": 2.0}, timeout_seconds=0.5)


def calls(*texts: str) -> list[RewardCall]:
    return [RewardCall("score", text, [{"role": "user", "content": "q"}], {}) for text in texts]


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool([TARGET], num_workers=2, search_path=[TESTS]) as made:
        yield made


def outcomes(pool: RewardPool, *texts: str) -> list[tuple[str, float | None]]:
    return [(result.outcome, result.value) for result in pool.score(calls(*texts))]


def test_values_come_back_in_order(pool: RewardPool) -> None:
    texts = ["x" * (index % 7 + 1) for index in range(300)]
    assert outcomes(pool, *texts) == [("value", 2.0 * len(text)) for text in texts]


@pytest.mark.parametrize(
    ("text", "outcome", "value", "reason"),
    [
        ("raise", "crash", None, "ZeroDivisionError"),
        ("nan", "crash", None, "nan"),
        ("inf", "crash", None, "inf"),
        ("text", "crash", None, "no number"),
        ("none", "wrong", 0.0, "None"),
        ("true", "value", 1.0, ""),
        ("numpy's true", "value", 1.0, ""),
        ("wrong", "wrong", 0.0, "no number in it"),
        ("exit", "crash", None, "SystemExit"),
    ],
)
def test_every_way_to_answer_has_its_outcome(
    pool: RewardPool, text: str, outcome: str, value: float | None, reason: str
) -> None:
    (result,) = pool.score(calls(text))
    assert (result.outcome, result.value) == (outcome, value)
    assert reason in result.reason


@pytest.mark.parametrize("text", ["hang", "spin"])
def test_a_call_that_overstays_is_ended_and_the_others_are_unharmed(pool: RewardPool, text: str) -> None:
    started = time.monotonic()
    found = outcomes(pool, "ab", text, "abc", *["a"] * 40)
    assert found == [("value", 4.0), ("timeout", None), ("value", 6.0), *[("value", 2.0)] * 40]
    assert time.monotonic() - started < 10
    assert any(failure.outcome == "timeout" for failure in pool.failures)


def test_a_call_that_stopped_leaves_where_it_stood() -> None:
    with RewardPool([TARGET], num_workers=1, search_path=[TESTS]) as fresh:
        good, stopped = fresh.score(calls("ab", "spin"))
    assert (good.stack, stopped.outcome) == ("", "timeout")
    assert "most recent call first" in stopped.stack
    assert "bad_rewards.py" in stopped.stack


def test_a_worker_that_dies_costs_one_call(pool: RewardPool) -> None:
    assert outcomes(pool, "a", "die", "ab", "die", "abc") == [
        ("value", 2.0),
        ("crash", None),
        ("value", 4.0),
        ("crash", None),
        ("value", 6.0),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "rubbish",
        "a result of none",
        "a result of NaN",
        "an object",
        "no line's end",
        "more results",
        "an answer",
        "taken once more",
    ],
)
def test_what_a_reward_writes_to_the_pipe_of_results_costs_its_worker_and_not_the_run(text: str) -> None:
    with RewardPool([replace(TARGET, timeout_seconds=60.0)], num_workers=1, search_path=[TESTS]) as made:
        first = made.score(calls(text))[0]
        assert (first.outcome, first.value) == ("crash", None)
        assert "it wrote to its worker's pipe of results" in first.reason
        assert outcomes(made, "ab", "abc") == [("value", 4.0), ("value", 6.0)]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_module:score", "no module 'no_such_module'"),
        ("fakes.bad_rewards:missing", "has no 'missing'"),
        ("fakes.bad_rewards:never", "async"),
        ("fakes.bad_rewards:late", "async"),
        ("fakes.bad_rewards:yields", "yields; a reward returns one number"),
        ("fakes.bad_rewards:too_few", "cannot be called as (completion, prompt, fields):"),
        ("fakes.bad_rewards", "module:function"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_an_error_at_start(target: str, words: str) -> None:
    with pytest.raises(ManifestError) as caught:
        RewardPool([RewardTarget("score", target)], num_workers=1, search_path=[TESTS])
    assert words in str(caught.value)
    assert caught.value.exit_code == 64


def test_a_module_that_is_not_found_is_told_with_the_folders_of_the_user_only(tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        RewardPool([RewardTarget("score", "no_such_module:score")], num_workers=1, search_path=[str(tmp_path)])
    searched = caught.value.message.partition("searched: ")[2]
    assert searched.startswith(repr(str(tmp_path)))
    assert searched.endswith(", installed packages")
    assert "-packages" not in searched
    assert str(Path(os.__file__).parent) not in searched


def test_a_syntax_error_is_named_by_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "slip.py").write_text("x = 1\ndef score(completion, prompt, fields)\n    return 1\n")
    with pytest.raises(ManifestError, match=r"(?m)SyntaxError: expected ':' \(slip\.py, line 2\)$") as caught:
        RewardPool([RewardTarget("score", "slip:score")], num_workers=1, search_path=[str(tmp_path)])
    assert "importlib" not in str(caught.value)


def test_no_worker_outlives_a_parent_that_was_killed_not_even_one_that_spins() -> None:
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from orbit_runtime.workers.user_code.reward_pool import OUTPUT_BYTES, RewardPool\n"
        "from orbit_runtime.workers.user_code.reward_protocol import RewardTarget\n"
        "pool = RewardPool([RewardTarget('s', 'fakes.bad_rewards:by_text')], num_workers=2,"
        " search_path=[sys.argv[1]])\n"
        "from orbit_runtime.workers.user_code.reward_protocol import RewardCall\n"
        "pool.submit([RewardCall('s', 'spin', [], {})] * 2); time.sleep(0.2)\n"
        "print('ready', flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, TESTS], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    everyone = [str(pid) for pid in descendants(parent.pid)]
    assert len(everyone) == 4, "two workers, each with its guard"
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in everyone) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in everyone)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("how", ["its run ends", "it exits", "it overstays", "its run is killed"])
def test_what_a_reward_starts_ends_with_its_worker_also_in_a_session_of_its_own(how: str, tmp_path: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from orbit_runtime.workers.user_code.reward_pool import RewardPool\n"
        "from orbit_runtime.workers.user_code.reward_protocol import RewardCall, RewardTarget\n"
        "arguments = {'file': sys.argv[2]}\n"
        "seconds = 3.0 if sys.argv[3] == 'it overstays' else 60.0\n"
        "target = RewardTarget('s', 'fakes.bad_rewards:leaves_a_child', arguments, timeout_seconds=seconds)\n"
        "with RewardPool([target], num_workers=1, search_path=[sys.argv[1]]) as pool:\n"
        "    print(pool.score([RewardCall('s', sys.argv[3], [], {})]), flush=True)\n"
        "    if sys.argv[3] == 'its run is killed': sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, TESTS, str(tmp_path / "pid"), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        told = run.stdout.readline()
        if how == "its run is killed":
            assert _runs((tmp_path / "pid").read_text())
            run.kill()
    outcomes = {"it exits": "the worker exited with 3", "it overstays": "no result within 3 s"}
    assert outcomes.get(how, "value") in told
    deadline = time.monotonic() + 10
    while _runs((tmp_path / "pid").read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs((tmp_path / "pid").read_text())


def test_a_variable_that_code_of_a_user_misses_is_told_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret")
    target = RewardTarget("score", "fakes.bad_rewards:asks_for_a_key")
    found = []
    for each in (target, replace(target, variables=("MY_API_KEY", "NOT_SET"))):
        with RewardPool([each], num_workers=1, search_path=[TESTS]) as pool:
            found += pool.score(calls("by its name", "through a package"))
    assert [each.outcome for each in found] == ["crash", "crash", "value", "value"]
    assert all("spec.environment.variables" in each.reason for each in found[:2])
    assert found[0].reason.startswith("KeyError: 'MY_API_KEY' (")


def test_callables_of_this_process_are_scored_and_flagged_when_they_overstay() -> None:
    target = RewardTarget("score", bad_rewards.by_text, {"scale": 1.0}, timeout_seconds=0.2)
    with RewardThreads([target]) as threads:
        results = threads.score(calls("ab", "hang", "raise", "wrong"))
        assert ["bad_rewards.py" in result.stack for result in results] == [False, True, False, False]
        found = [(result.outcome, result.value) for result in results]
        assert found == [("value", 2.0), ("timeout", None), ("crash", None), ("wrong", 0.0)]
        assert len(threads.failures) == 2
    with pytest.raises(ManifestError, match="dotted path"):
        RewardThreads([target, RewardTarget("other", "fakes.bad_rewards:by_text")])


def test_a_worker_that_is_slow_to_wake_is_not_taken_for_a_slow_reward() -> None:
    with RewardPool([TARGET], num_workers=1, search_path=[TESTS]) as pool:
        (worker,) = descendants([pid for pid in children() if "reward_worker" in command(pid)][-1])
        os.kill(worker, signal.SIGSTOP)
        submitted = pool.submit(calls("ab"))
        with pytest.raises(TimeoutError):
            submitted.result(2 * TARGET.timeout_seconds)
        os.kill(worker, signal.SIGCONT)
        assert [result.outcome for result in submitted.result()] == ["value"]


def test_what_was_submitted_together_comes_back_together_however_much_else_is_under_way() -> None:
    # On a busy machine the slow call must not be ended before the quick ones had their turn.
    patient = replace(TARGET, timeout_seconds=5.0)
    with RewardPool([patient], num_workers=2, search_path=[TESTS]) as pool:
        slow = pool.submit(calls("hang", "a"))
        # A worker is handed several calls at once: those that come later go to the other one.
        while pool._pending:
            time.sleep(0.01)
        quick = [pool.submit(calls("a" * length, "b")) for length in range(1, 6)]
        assert [[result.value for result in each.result(30)] for each in quick] == [[2.0 * n, 2.0] for n in range(1, 6)]
        assert not slow.done()
        assert [result.outcome for result in slow.result(30)] == ["timeout", "value"]


@pytest.mark.parametrize("kind", [RewardPool, RewardThreads])
def test_who_waits_for_a_scorer_that_is_closed_waits_no_longer(kind: type[RewardPool] | type[RewardThreads]) -> None:
    target = TARGET.target if kind is RewardPool else bad_rewards.by_text
    targets = [RewardTarget("score", target, {"scale": 2.0}, timeout_seconds=1.0)]
    scorer = RewardPool(targets, num_workers=1, search_path=[TESTS]) if kind is RewardPool else RewardThreads(targets)
    submitted = [scorer.submit(calls("hang")), scorer.submit(calls("hang", "hang"))]
    scorer.close()
    with pytest.raises(CancelledError):
        submitted[1].result(30)


def children() -> list[int]:
    """Of every thread of this process, oldest first."""
    listed = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    return sorted(int(pid) for pids in listed for pid in pids)


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_megabytes_that_rewards_print_are_cut_and_the_rewards_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    """From two workers, one of which ends: the limit is that of all, and what they print first is kept."""
    with RewardPool([replace(TARGET, timeout_seconds=60.0)], num_workers=2, search_path=[TESTS]) as pool:
        found = outcomes(pool, "chat", "chat", "die", "chat", "xx")
    assert found == [("value", 1.0), ("value", 1.0), ("crash", None), ("value", 1.0), ("value", 4.0)]
    said = capfd.readouterr()
    assert said.out == ""
    assert "the first words" in said.err
    assert len(said.err) < OUTPUT_BYTES + 1000
    assert said.err.count("rewards printed too much") == 1
    assert said.err.rstrip().endswith("write what is to be kept to a file)")


def test_what_a_worker_prints_just_before_it_dies_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with RewardPool([TARGET], num_workers=1, search_path=[TESTS]) as pool:
        outcomes(pool, "last words", "die")
    assert "a reward may print last words" in capfd.readouterr().err
