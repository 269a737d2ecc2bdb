"""`orbit replay`: what a run recorded is what it trained on, and gives the same adapters again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orbit_runtime.cli.main import run_command
from orbit_runtime.data.records import compress_rollouts, decompress_rollouts
from tests.integration.killing import small_manifest
from tests.integration.run_launcher import RunLauncher

STEPS = 4


@pytest.fixture(scope="module", params=["LoRA", "OFT"])
def out(request: pytest.FixtureRequest, launcher: RunLauncher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose reward holds the KL penalty, so that the trainer has a part in the advantages."""
    folder = tmp_path_factory.mktemp("replay") / "run"
    manifest = small_manifest(steps=STEPS, adapter=request.param)
    manifest["spec"]["algorithm"]["kl"] = {"coefficient": 0.1, "placement": "Reward"}
    assert launcher.run(manifest, str(folder)) == 0
    return folder


def replay(out: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict]:
    capsys.readouterr()
    code = run_command(["replay", str(out), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def test_recorded_rollouts_give_the_same_adapter_after_every_step(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = replay(out, capsys)
    assert (code, found["equal"]) == (0, True)
    recorded = [json.loads(line)["adapter_digest"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [each["replayed"] for each in found["steps"]] == recorded
    assert len(set(recorded)) == STEPS
    assert run_command(["replay", str(out), "--steps", "1"]) == 0
    assert "1 step trained again" in capsys.readouterr().out


def check_other_threads_are_told(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The adapter differs, and the run was computed by other threads than are here: that is told, not a verdict."""
    path = out / "run.json"
    kept = path.read_text()
    run = json.loads(kept)
    here = run["rounding"][0]["threads"]
    run["rounding"][0]["threads"] = "7"
    try:
        path.write_text(json.dumps(run))
        code, found = replay(out, capsys)
        assert (code, found["computed_elsewhere"]) == (84, [f"threads: 7 then, {here} now"])
        assert run_command(["replay", str(out)]) == 84
        shown = capsys.readouterr().out
        assert "NOT COMPARABLE" in shown
        assert "FAILED" not in shown
        assert "Set OMP_NUM_THREADS and MKL_NUM_THREADS to 7" in shown
    finally:
        path.write_text(kept)


def test_a_rollout_that_was_changed_shows_at_its_step_and_a_missing_one_is_named(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = out / "rollouts" / "step-000002.jsonl.zst"
    kept = file.read_bytes()
    rollouts = decompress_rollouts(kept)
    changed = next(index for index, each in enumerate(rollouts) if any(each.loss_mask_T))
    logprobs = tuple(
        value - 0.5 * mask
        for value, mask in zip(rollouts[changed].logprobs_T, rollouts[changed].loss_mask_T, strict=True)
    )
    rollouts[changed] = replace(rollouts[changed], logprobs_T=logprobs)
    try:
        file.write_bytes(compress_rollouts(rollouts))
        code, found = replay(out, capsys)
        assert (code, found["equal"]) == (84, False)
        first, second = found["steps"]
        assert first["recorded"] == first["replayed"]
        assert second["recorded"] != second["replayed"]
        assert found["computed_elsewhere"] == []
        assert run_command(["replay", str(out)]) == 84
        assert "FAILED" in capsys.readouterr().out
        check_other_threads_are_told(out, capsys)
        file.unlink()
        assert run_command(["replay", str(out)]) == 65
        assert "step 2 has no recorded rollouts" in capsys.readouterr().err
    finally:
        file.write_bytes(kept)


def test_a_folder_without_a_run_is_the_users_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["replay", str(tmp_path)]) == 64
    assert "no run with a finished step" in capsys.readouterr().err


def test_a_damaged_folder_is_told_by_its_file_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [
        ("{", "", 73, "run.json is not JSON: the file is damaged", "restore the file"),
        ("[]", "", 73, "run.json holds no run: the file is damaged", "restore the file"),
        ('{"resolved": {}}', '{"step": 1, "rew', 65, "a step's row is not JSON", "the rows are in metrics/ as well"),
    ]
    for run, rows, code, problem, fix in cases:
        (tmp_path / "run.json").write_text(run)
        (tmp_path / "metrics.jsonl").write_text(rows)
        assert run_command(["replay", str(tmp_path)]) == code
        told = capsys.readouterr().err
        assert problem in told
        assert f"  fix: {fix}" in told or fix in told.splitlines()[-1]
