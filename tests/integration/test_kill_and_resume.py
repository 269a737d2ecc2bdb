"""kill -9 at any moment costs nothing: rows and adapter equal those of a run that was left alone, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.cli.main import run_command
from orbit_runtime.loop import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import open_store
from tests.integration.killing import (
    check_same_run,
    demanding_manifest,
    kill_until_done,
    small_manifest,
    timeless_rows,
)
from tests.integration.load import ENVIRONMENT, busy_machine
from tests.integration.run_launcher import RunLauncher


@pytest.fixture(scope="module")
def two_threads() -> Iterator[RunLauncher]:
    made = RunLauncher(ENVIRONMENT)
    yield made
    made.close()


@pytest.fixture
def loaded(two_threads: RunLauncher) -> Iterator[RunLauncher]:
    """Runs with two threads, on a machine whose cores are wanted by others as well: only for as long as they run."""
    with busy_machine(processes_per_core=1):
        yield two_threads


@pytest.mark.timeout(1200)  # several starts on a machine that is busy on purpose; `make same-bits` kills ten times each
@pytest.mark.parametrize(
    ("name", "every_steps", "kills", "steps"),
    [
        ("LoRA with dropout", 1, 3, 12),
        pytest.param("OFT on NVFP4, its own teacher", 3, 2, 10, marks=pytest.mark.long),
        pytest.param("MXFP4, PPO with KL", 1, 1, 5, marks=pytest.mark.long),
    ],
    ids=["LoRA, three", "OFT, two", "PPO, one"],
)
def test_kills_change_no_bit(
    tmp_path: Path, loaded: RunLauncher, name: str, every_steps: int, kills: int, steps: int
) -> None:
    manifest = demanding_manifest(name, steps=steps, every_steps=every_steps)
    started = time.monotonic()
    assert loaded.run(manifest, str(tmp_path / "alone")) == 0
    undisturbed = time.monotonic() - started
    kill_until_done(loaded, manifest, str(tmp_path / "killed"), kills=kills, seed=every_steps, alone=undisturbed)
    check_same_run(open_store(str(tmp_path / "killed")), open_store(str(tmp_path / "alone")), kills=kills, steps=steps)


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_run_whose_folder_is_taken_away_ends_and_does_not_make_it_anew(
    tmp_path: Path, launcher: RunLauncher, is_removed: bool
) -> None:
    folder = tmp_path / "run"
    launcher.start(small_manifest(steps=1000), str(folder))
    while not (folder / "metrics" / "step-000003.json").exists():
        time.sleep(0.02)
    folder.rename(tmp_path / "elsewhere")
    if is_removed:
        shutil.rmtree(tmp_path / "elsewhere")
    assert launcher.wait() == 74
    assert not folder.exists()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, launcher: RunLauncher) -> Path:
    """A run of four steps whose manifest asked for no more."""
    folder = tmp_path_factory.mktemp("rows") / "run"
    assert launcher.run(small_manifest(steps=4), str(folder)) == 0
    return folder


def _changed(row: Path) -> None:
    row.write_text(json.dumps({**json.loads(row.read_text()), "reward_mean": 0.99}))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (Path.unlink, "rows in metrics/ are missing or damaged, of steps 2"),
        (_changed, "rows in metrics/ are not what the run wrote, of steps 2"),
    ],
    ids=["missing", "changed"],
)
def test_a_row_that_is_not_what_the_run_wrote_is_told_by_all_who_read_it(
    tmp_path: Path,
    stopped: Path,
    damage: Callable[[Path], None],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, manifest = shutil.copytree(stopped, tmp_path / "run"), tmp_path / "run.json"
    assert not any("rows" in each for each in json.loads((folder / "report.json").read_text())["warnings"])
    damage(folder / "metrics" / "step-000002.json")
    (folder / "metrics.jsonl").unlink()
    assert run_command(["report", str(folder)]) == 0
    assert told in (folder / "report.html").read_text()
    assert run_command(["replay", str(folder)]) == 65
    assert told in capsys.readouterr().err
    manifest.write_text(json.dumps(small_manifest(steps=5)))
    assert run_command(["run", str(manifest), "--out", str(folder)]) == 0
    assert told in capsys.readouterr().err
    assert told in json.loads((folder / "report.json").read_text())["warnings"][0]


@pytest.mark.parametrize("text", ["null", "[]", "{}", "{", '{"step": 7}'])
def test_a_row_that_is_no_row_ends_a_resume_before_it_trains(
    tmp_path: Path, stopped: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, manifest = shutil.copytree(stopped, tmp_path / "run"), tmp_path / "run.json"
    (folder / "metrics" / "step-000002.json").write_text(text)
    (folder / "metrics.jsonl").unlink()
    manifest.write_text(json.dumps(small_manifest(steps=5)))
    assert run_command(["run", str(manifest), "--out", str(folder)]) == 74
    assert "metrics/step-000002.json is not the row of a step" in capsys.readouterr().err
    assert not (folder / "metrics" / "step-000005.json").exists()
    assert run_command(["report", str(folder)]) == 0
    assert "missing or damaged, of steps 2" in (folder / "report.html").read_text()


def test_sigterm_finishes_the_step_and_the_same_command_continues(tmp_path: Path, launcher: RunLauncher) -> None:
    manifest = small_manifest(steps=25, every_steps=1000)
    assert launcher.run(manifest, str(tmp_path / "alone")) == 0
    out = str(tmp_path / "stopped")
    pid = launcher.start(manifest, out)
    store = open_store(out)
    while not store.exists("metrics/step-000005.json"):
        time.sleep(0.02)
    os.kill(pid, signal.SIGTERM)
    assert launcher.wait() == 75
    newest = json.loads(store.get("report.json"))
    assert newest["status"] == "stopped"
    assert 5 <= newest["steps"] < 25
    assert newest["last_checkpoint"].rstrip("/").endswith(f"{newest['steps']:06d}")
    assert newest["base_digest_after"] == newest["base_digest_before"]
    assert launcher.run(manifest, out) == 0
    assert timeless_rows(store) == timeless_rows(open_store(str(tmp_path / "alone")))


def test_a_finished_run_started_again_does_nothing_and_more_steps_continue_it(
    tmp_path: Path, launcher: RunLauncher
) -> None:
    out, alone = str(tmp_path / "grown"), str(tmp_path / "alone")
    assert launcher.run(small_manifest(steps=4), out) == 0
    before = open_store(out).get("metrics.jsonl")
    assert launcher.run(small_manifest(steps=4), out) == 0
    assert open_store(out).get("metrics.jsonl") == before
    assert launcher.run(small_manifest(steps=9), out) == 0
    assert launcher.run(small_manifest(steps=9), alone) == 0
    assert timeless_rows(open_store(out)) == timeless_rows(open_store(alone))


def test_another_seed_is_another_run(tmp_path: Path, launcher: RunLauncher) -> None:
    out = str(tmp_path / "run")
    assert launcher.run(small_manifest(steps=2), out) == 0
    assert launcher.run(small_manifest(steps=2, seed=1), out) == 73


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str, **facts: Any) -> None:
        self.notes.append(message)


@pytest.mark.timeout(300)
def test_a_resume_under_another_number_of_threads_is_noted_and_kept(tmp_path: Path, launcher: RunLauncher) -> None:
    out = str(tmp_path / "run")
    assert launcher.run(small_manifest(steps=1), out) == 0
    store = open_store(out)
    before = json.loads(store.get("run.json"))
    (here,) = before["rounding"]
    elsewhere = here | {"threads": "7"}
    store.put("run.json", json.dumps(before | {"rounding": [elsewhere]}).encode())
    progress = Notes()
    run(OrbitRun.model_validate(small_manifest(steps=2)), out=out, progress=progress)
    assert f"changed since the last start: threads: 7 then, {here['threads']} now" in progress.notes
    assert json.loads(store.get("run.json"))["rounding"] == [elsewhere, here]
