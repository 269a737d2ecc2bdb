"""Trainer and orchestrator apart over endpoints that are there already: no inference process, no torch in the loop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.guide import ROOT

from orbit_runtime.cli.main import run_command
from orbit_runtime.loop.run import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import Store, open_store
from tests.integration.killing import small_manifest, timeless_rows
from tests.integration.policy_server import PolicyServer
from tests.integration.test_three_processes import WITHOUT_TORCH
from tests.integration.three_processes import TOKEN, Side, two_sides

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(
    scope="module",
    params=[pytest.param(True, id="plug-in"), pytest.param(False, id="no plug-in", marks=pytest.mark.long)],
)
def server(request: pytest.FixtureRequest) -> Iterator[PolicyServer]:
    made = PolicyServer(plugin=request.param)
    made.start()
    yield made
    made.stop()


def manifest(url: str, *, steps: int, every_steps: int = 1) -> dict[str, Any]:
    asked = small_manifest(steps=steps, every_steps=every_steps)
    asked["spec"]["rollout"] |= {"engine": "OpenAI", "endpoints": [{"url": url}]}
    return asked


class Orchestrator:
    """`orbit orchestrator` in a process in which torch cannot be imported."""

    def __init__(self, asked: dict[str, Any], folder: Path, trainer: Side) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "run.json").write_text(json.dumps(asked))
        self.out = folder / "out"
        command = ["orchestrator", str(folder / "run.json"), "--trainer", trainer.url, "--out", str(self.out)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", WITHOUT_TORCH, *command],
            env={**os.environ, "ORBIT_SERVICE_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def await_step(self, step: int) -> None:
        until = time.monotonic() + 300
        while not (self.out / f"metrics/step-{step:06d}.json").exists():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def end(self) -> Store:
        _, said = self.process.communicate()
        assert self.process.returncode == 0, said
        return open_store(str(self.out))


@pytest.mark.long
def test_rows_are_those_of_one_process_whoever_is_lost(server: PolicyServer, tmp_path: Path) -> None:
    asked = manifest(server.url, steps=5, every_steps=2)
    run(OrbitRun.model_validate(asked), out=str(tmp_path / "one"), progress=SilentProgress())
    one = open_store(str(tmp_path / "one"))
    with two_sides(asked) as sides:
        assert [*sides] == ["trainer"]
        orchestrator = Orchestrator(asked, tmp_path / "apart", sides["trainer"])
        orchestrator.await_step(1)
        sides["trainer"].kill()
        sides["trainer"].start()
        orchestrator.await_step(3)
        # Its adapters stay on the server, under names that its successor uses.
        orchestrator.kill()
        assert any(name.startswith("policy-v") for name in server.held)
        apart = Orchestrator(asked, tmp_path / "apart", sides["trainer"]).end()
    assert timeless_rows(apart) == timeless_rows(one)
    report = json.loads(apart.get("report.json"))
    assert (report["status"], report["executions"]) == ("done", 2)
    assert report["publishes"] == report["publishes_proven"]


def test_an_endpoint_that_applies_another_adapter_ends_the_run_and_layers_are_not_looked_for(
    server: PolicyServer, tmp_path: Path
) -> None:
    asked = manifest(server.url, steps=3)
    with two_sides(asked) as sides:
        orchestrator = Orchestrator(asked, tmp_path / "apart", sides["trainer"])
        orchestrator.await_step(1)
        server.serves_stale = True
        _, said = orchestrator.process.communicate()
        server.serves_stale = False
    assert orchestrator.process.returncode == 84, said
    assert "could not be proven live" in said
    assert "`orbit parity`" in said
    assert "Traceback" not in said


def test_there_is_no_inference_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text(json.dumps(manifest("http://127.0.0.1:1", steps=1)))
    assert run_command(["inference", str(tmp_path / "run.json")]) == 64
    assert "the servers of spec.rollout.endpoints sample" in capsys.readouterr().err
