"""Whole runs with SGLang as the engine: the quickstart's manifest, and what a killed server or run costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orbit_runtime.cli.main import run_command
from orbit_runtime.data.records import decompress_rollouts
from orbit_runtime.storage import open_store
from tests.engines.whole_runs import end_runs, start_run, wait_for_step

ROOT = Path(__file__).parents[2]
STEPS = 6
ROLLOUTS = 32 * 16

pytestmark = pytest.mark.timeout(1800)
"""Two starts of a server and nine steps; beside other work each start alone has taken two minutes."""


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    end_runs()


def start(out: Path, *overrides: str, steps: int = STEPS) -> subprocess.Popen[bytes]:
    """`orbit run` of the quickstart, unchanged but for the engine and what is given."""
    return start_run("quickstart.yaml", out, "spec.rollout.engine=SGLang", f"spec.training.steps={steps}", *overrides)


def servers(run: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [each for each in psutil.Process(run.pid).children() if "sglang_plugin" in " ".join(each.cmdline())]


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def check_report(out: Path, steps: int) -> dict:
    report = dict(json.loads((out / "report.json").read_text()))
    assert report["status"] == "done"
    assert report["publishes"] == report["publishes_proven"]
    assert report["base_digest_before"] == report["base_digest_after"]
    found = rows(out)
    assert [row["step"] for row in found] == list(range(1, steps + 1))
    for row in found:
        assert row["reward_value"] + row["reward_wrong"] == ROLLOUTS, "every rollout counts once"
        assert row["parity_mean"] <= row["parity_limit"] <= 1e-4
    store = open_store(str(out))
    assert all(store.exists(f"rollouts/step-{step:06d}.jsonl.zst") for step in range(1, steps + 1))
    return report


def test_a_run_with_oft_that_sleeps_is_proven_at_every_publish_and_at_parity_in_every_step(tmp_path: Path) -> None:
    """On a CPU nothing is freed; what is asked of SGLang, and what must hold after it, is the same."""
    out = tmp_path / "oft"
    run = start(out, "spec.adapter={type: OFT}", "spec.training.learningRate=1e-3", "spec.rollout.sleep=All", steps=3)
    assert run.wait(1000) == 0, out.with_suffix(".log").read_text()[-3000:]
    report = check_report(out, 3)
    assert report["publishes"] == 4
    assert len({row["adapter_digest"] for row in rows(out)}) == 3
    assert min(report["engine_sleep"].values()) > 2**28
    before, after = (json.loads((out / f"parity/{when}-e000001.json").read_text()) for when in ("preflight", "wake"))
    assert after["policy"]["mean"] <= before["limit"]


def test_a_killed_server_costs_no_step(tmp_path: Path) -> None:
    out = tmp_path / "server-killed"
    run = start(out)
    wait_for_step(out, 2, run)
    (server,) = servers(run)
    os.killpg(server.pid, signal.SIGKILL)
    assert run.wait(1000) == 0, out.with_suffix(".log").read_text()[-3000:]
    report = check_report(out, STEPS)
    assert report["adapter_transport"] == "SharedMemory"
    assert report["executions"] == 1
    assert report["publishes"] == STEPS + 1


def test_a_replica_that_is_killed_costs_no_step_and_the_run_goes_on_meanwhile(tmp_path: Path) -> None:
    out = tmp_path / "replica-killed"
    run = start(out, "spec.rollout.replicas=2", steps=4)
    wait_for_step(out, 2, run)
    _, second = servers(run)
    os.killpg(second.pid, signal.SIGKILL)
    assert run.wait(1000) == 0, out.with_suffix(".log").read_text()[-3000:]
    report = check_report(out, 4)
    assert report["adapter_transport"] == "SharedMemory"
    assert report["executions"] == 1
    assert report["publishes"] == 5
    assert json.loads((out / "parity" / "preflight-e000001-1.json").read_text())["engine"] == "replica 1"


def test_a_run_on_a_server_of_two_processes_is_proven_at_every_publish_and_ends_both(tmp_path: Path) -> None:
    out = tmp_path / "two-processes"
    run = start(out, "spec.rollout.tensorParallel=2", steps=2)
    wait_for_step(out, 1, run)
    (server,) = servers(run)
    family = [server, *server.children(recursive=True)]
    assert len([each for each in family if "scheduler" in " ".join(each.cmdline())]) == 2
    assert run.wait(1000) == 0, out.with_suffix(".log").read_text()[-3000:]
    report = check_report(out, 2)
    assert report["publishes"] == 3
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in family)


def test_a_killed_run_leaves_no_server_and_goes_on_without_losing_or_doubling_a_step(tmp_path: Path) -> None:
    out = tmp_path / "run-killed"
    run = start(out)
    wait_for_step(out, 3, run)
    (server,) = servers(run)
    family = [server, *server.children(recursive=True)]
    run.kill()
    run.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    again = start(out)
    assert again.wait(800) == 0, out.with_suffix(".log").read_text()[-3000:]
    report = check_report(out, STEPS)
    assert report["executions"] == 2
    assert report["resumed"] == 1
    # What was recorded is what was trained on, before the kill and after it: no engine has a part in this.
    assert run_command(["replay", str(out)]) == 0


def test_steps_overlap_within_their_bound_and_a_kill_loses_no_rollout(tmp_path: Path) -> None:
    out, steps = tmp_path / "run", 5
    overlapping = ["spec.rollout.maxStaleness=1", "spec.rollout.sampling.maxNewTokens=24", "spec.data.limit=200"]
    overlapping += ["spec.rollout.sampling.ignoreEos=true", "spec.algorithm.groupSize=4"]
    overlapping += ["spec.placement.layout=Split", "spec.placement.gpus=2"]
    run = start(out, *overlapping, steps=steps)
    wait_for_step(out, 2, run)
    run.kill()
    assert run.wait() == -signal.SIGKILL
    assert start(out, *overlapping, steps=steps).wait() == 0, out.with_suffix(".log").read_text()[-3000:]
    report = json.loads((out / "report.json").read_text())
    assert (report["status"], report["publishes"]) == ("done", report["publishes_proven"])
    seen, store, oldest = set(), open_store(str(out)), 0
    for row in rows(out):
        key = f"rollouts/step-{row['step']:06d}.jsonl.zst"
        rollouts = decompress_rollouts(store.get(key))
        seen |= {(each.prompt_id, each.sample_index) for each in rollouts}
        age = [row["step"] - 1 - version for each in rollouts for version in each.versions_T if version >= 0]
        assert 0 <= min(age) <= max(age) == row["staleness_max"] <= 1
        oldest = max(oldest, *age)
    assert len(seen) == steps * 32 * 4, "every rollout counts once"
    assert oldest == 1, "nothing overlapped: the test shows nothing"


def test_tools_are_called_and_only_what_was_sampled_trains(tmp_path: Path) -> None:
    out, small = tmp_path / "tools", ["training.promptsPerStep=4", "training.steps=3", "rollout.engine=SGLang"]
    run = start_run("calculator.yaml", out, *(f"spec.{each}" for each in small))
    assert run.wait(1000) == 0, out.with_suffix(".log").read_text()[-3000:]
    report = json.loads((out / "report.json").read_text())
    assert (report["status"], report["publishes"], report["publishes_proven"]) == ("done", 4, 4)
    store, right = open_store(str(out)), 0
    for row in rows(out):
        assert row["parity_mean"] <= row["parity_limit"] <= 1e-4, "the trainer finds the log-probs of every turn again"
        assert row["tool_calls"] > row["tool_errors"]
        rollouts = decompress_rollouts(store.get(f"rollouts/step-{row['step']:06d}.jsonl.zst"))
        assert len(rollouts) == row["reward_value"] == 4 * 8
        for each in rollouts:
            for turn in each.turns:
                flags = {*each.loss_mask_T[turn.start : turn.end]}
                assert flags <= ({1} if turn.role == "assistant" else {0}), "what the policy sampled, and nothing else"
            assert {*each.versions_T} == {-1, row["step"] - 1}
        right += sum(each.turns[2].role == "tool" for each in rollouts if len(each.turns) == 4)
    assert right > 0, "no tool answered: the test shows nothing"
    assert run_command(["replay", str(out)]) == 0
