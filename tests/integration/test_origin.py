"""A run that begins from another's checkpoint goes on as that one would have, and takes nothing that does not fit."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.cli.main import run_command
from orbit_runtime.loop import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import open_store
from tests.integration.killing import small_manifest, timeless_rows
from tests.integration.run_launcher import RunLauncher


def manifest(*, steps: int, origin: Path | str | None = None, **changes: Any) -> dict[str, Any]:
    made = small_manifest(steps=steps)
    # A schedule that does not depend on the number of steps.
    made["spec"]["training"]["schedule"] = {"type": "Constant"}
    made["spec"].update(changes)
    if origin is not None:
        made["spec"]["checkpoint"]["resumeFrom"] = str(origin)
    return made


@pytest.fixture(scope="module")
def first(launcher: RunLauncher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("origin") / "first"
    assert launcher.run(manifest(steps=3), str(out)) == 0
    return out


def test_it_goes_on_bit_for_bit_with_optimizer_and_prompts(launcher: RunLauncher, first: Path, tmp_path: Path) -> None:
    longer, alone = tmp_path / "longer", tmp_path / "alone"
    assert launcher.run(manifest(steps=6, origin=first), str(longer)) == 0
    assert launcher.run(manifest(steps=6), str(alone)) == 0
    assert timeless_rows(open_store(str(longer))) == timeless_rows(open_store(str(alone)))[3:]
    told = json.loads((longer / "run.json").read_text())
    assert told["origin"]["checkpoint"] == "checkpoints/step-000003"
    report = json.loads((longer / "report.json").read_text())
    assert (report["steps"], report["publishes"], report["resumed"]) == (6, 4, 0)
    assert run_command(["replay", str(longer)]) == 0


def test_a_checkpoint_may_be_named_and_stays_the_one_it_was(launcher: RunLauncher, first: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    made = manifest(steps=4, origin=first / "checkpoints" / "step-000002")
    made["spec"]["training"]["learningRate"] = 1e-4
    assert launcher.run(made, str(out)) == 0
    rows = timeless_rows(open_store(str(out)))
    assert [row["step"] for row in rows] == [3, 4]
    assert [row["learning_rate"] for row in rows] == [1e-4, 1e-4], "the optimizer goes on, at this run's rate"
    made["spec"]["training"]["steps"] = 5
    assert launcher.run(made, str(out)) == 0
    told = json.loads((out / "run.json").read_text())
    assert told["origin"]["checkpoint"] == "checkpoints/step-000002"


def test_a_stop_in_the_first_step_of_one_that_samples_ahead_is_a_stop(tmp_path: Path) -> None:
    """There is no checkpoint of its own yet that could keep the rollouts."""
    called: list[str] = []

    def stopping(completion: str, prompt: Any, fields: Any) -> float:
        called.append(completion)
        if called == [completion] and (tmp_path / "second").exists():
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2 if (tmp_path / "second").exists() else 0.0)
        return float(len(completion) % 2)

    ahead = {"maxStaleness": 1, "sampling": {"maxNewTokens": 4}}
    for name, steps, origin in (("first", 1, None), ("second", 3, tmp_path / "first")):
        called.clear()
        spec = OrbitRun.model_validate(manifest(steps=steps, origin=origin, rollout=ahead))
        found = run(spec, out=str(tmp_path / name), rewards={"correct": stopping}, progress=SilentProgress())
        assert found.ended == ("done" if origin is None else "stopped")


@pytest.mark.parametrize(
    ("changes", "ending", "message"),
    [
        ({"adapter": {"type": "LoRA", "lora": {"rank": 2}}}, "", "that run's `adapter` is different"),
        ({"model": {"uri": "builtin://tiny-adder", "precision": "FP8"}}, "", "trained on another base"),
        ({}, "/checkpoints/step-000009", "checkpoints/step-000009 is no complete checkpoint"),
        ({}, "-not", "there is no run to begin from"),
        ({"steps": 3}, "", "is at step 3 already, and 3 steps were requested"),
    ],
)
def test_what_does_not_fit_is_the_manifests_mistake(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], ending: str, message: str
) -> None:
    steps = changes.pop("steps", 6)
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(manifest(steps=steps, origin=f"{first}{ending}", **changes)))
    assert run_command(["run", str(file), "--out", str(tmp_path / "out")]) == 64
    told = capsys.readouterr()
    assert message in told.out + told.err
    assert not (tmp_path / "out" / "metrics").exists()
