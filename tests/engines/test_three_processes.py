"""Three processes with a real SGLang server: each of them is killed, and the run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orbit_runtime.cli.main import run_command
from tests.engines.whole_runs import ROOT, end_runs, log_of, start_command, wait_for_step
from tests.integration.killing import small_manifest

pytestmark = pytest.mark.timeout(2400)
STEPS = 7


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    end_runs()


def start(out: Path) -> subprocess.Popen[bytes]:
    asked = small_manifest(steps=STEPS, every_steps=2)
    asked["spec"]["rollout"]["engine"] = "SGLang"
    file = out.with_suffix(".json")
    file.write_text(json.dumps(asked))
    return start_command(out, "rl", str(file), "--out", str(out))


def child(run: subprocess.Popen[bytes], kind: str) -> psutil.Process:
    (found,) = [each for each in psutil.Process(run.pid).children() if kind in each.cmdline()]
    return found


def server_of(inference: psutil.Process) -> psutil.Process:
    (found,) = [each for each in inference.children() if "sglang_plugin" in " ".join(each.cmdline())]
    return found


def check_report(out: Path, steps: int, executions: int) -> None:
    """Every step once, every publish proven, parity within the floor's limit."""
    report = json.loads((out / "report.json").read_text())
    assert (report["status"], report["executions"]) == ("done", executions)
    assert report["publishes"] == report["publishes_proven"]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["parity_mean"] <= row["parity_limit"] <= 1e-4 for row in rows)
    # What was recorded is what was trained on, whoever was lost.
    assert run_command(["replay", str(out)]) == 0


def test_each_process_is_killed_and_every_step_is_there_and_every_publish_is_proven(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = start(out)
    wait_for_step(out, 1, run, seconds=900)
    os.killpg(server_of(child(run, "inference")).pid, signal.SIGKILL)
    wait_for_step(out, 3, run, seconds=900)
    inference = child(run, "inference")
    lost = [inference, server_of(inference)]
    inference.kill()
    wait_for_step(out, 5, run, seconds=900)
    assert child(run, "inference").pid != inference.pid
    child(run, "trainer").kill()
    wait_for_step(out, 6, run, seconds=900)
    everything = psutil.Process(run.pid).children(recursive=True)
    assert any("sglang_plugin" in " ".join(each.cmdline()) for each in everything)
    assert run.wait(900) == 0, log_of(out).read_text()[-3000:]
    _, alive = psutil.wait_procs([*everything, *lost], timeout=60)
    assert alive == []
    check_report(out, STEPS, 1)
    said = log_of(out).read_text()
    assert "Traceback" not in said
    for kind in ("inference", "trainer"):
        assert f"the {kind} process ended by signal 9; starting it again" in said
    resolved = json.loads((out / "run.json").read_text())["resolved"]
    assert resolved["spec"]["rollout"]["adapterTransport"] == "SharedMemory"


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from orbit_runtime.cli.main import main
main()
"""


def test_an_orchestrator_without_torch_is_killed_and_goes_on_and_the_next_run_finds_the_servers_empty(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.json"
    asked = small_manifest(steps=4)
    asked["spec"]["rollout"]["engine"] = "SGLang"
    file.write_text(json.dumps(asked))
    urls = {}
    for kind in ("trainer", "inference"):
        side = start_command(tmp_path / kind, kind, str(file), "--listen", "127.0.0.1:0", stdout=subprocess.PIPE)
        assert side.stdout is not None
        urls[kind] = side.stdout.readline().decode().split()[-1]
    options = [part for kind, url in urls.items() for part in (f"--{kind}", url)]

    def orchestrate(out: Path) -> subprocess.Popen[bytes]:
        with log_of(out).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", WITHOUT_TORCH, "orchestrator", str(file), *options, "--out", str(out)],
                env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log,
            )  # fmt: skip

    first, second = tmp_path / "first", tmp_path / "second"
    run = orchestrate(first)
    wait_for_step(first, 2, run, seconds=900)
    run.kill()
    run.wait()
    assert orchestrate(first).wait(900) == 0, log_of(first).read_text()[-3000:]
    assert orchestrate(second).wait(900) == 0, log_of(second).read_text()[-3000:]
    check_report(first, 4, 2)
    check_report(second, 4, 1)
