"""Named algorithms through a whole run: what holds in the end is written down, drops are kept, replays are equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.cli.main import run_command
from orbit_runtime.spec.objectives import OBJECTIVES
from tests.integration.killing import small_manifest

# Whole runs and replays: seconds each, minutes on a busy machine.
pytestmark = pytest.mark.timeout(600)


def run(
    folder: Path, rewards: list[dict[str, Any]] | None = None, *, steps: int = 2, **algorithm: Any
) -> list[dict[str, Any]]:
    manifest = small_manifest(steps=steps)
    manifest["spec"]["algorithm"] |= algorithm
    if rewards is not None:
        manifest["spec"]["environment"]["rewards"] = rewards
    (folder / "run.yaml").write_text(json.dumps(manifest))
    assert run_command(["run", str(folder / "run.yaml"), "--out", str(folder / "out")]) == 0
    return [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - {"Custom", "Distillation", "SFT"}))
def test_every_algorithm_trains_and_is_replayed(tmp_path: Path, name: str) -> None:
    """With KL, so that each placement is run; with a correction of whole sequences. Distillation and
    SFT, which have neither: `test_distillation_runs`, `test_sft`."""
    rows = run(
        tmp_path,
        type=name,
        kl={"coefficient": 0.05},
        importanceSampling={"type": "SequenceMasked", "veto": 1e-4},
    )
    assert rows[-1]["grad_norm"] > 0
    assert rows[-1]["kl"] is not None
    assert rows[-1]["dropped_fraction"] == 0.0, "the engine is the trainer's own policy"
    resolved = json.loads((tmp_path / "out/run.json").read_text())["resolved"]["spec"]["algorithm"]
    assert resolved["clip"]["high"] == OBJECTIVES[name].clip_high  # type: ignore[index]
    assert resolved["kl"]["estimator"] == OBJECTIVES[name].kl_estimator  # type: ignore[index]
    assert run_command(["replay", "out"]) == 0


def test_groups_that_teach_nothing_are_replaced_recorded_and_left_out(tmp_path: Path) -> None:
    rows = run(tmp_path, type="DAPO", groupSize=2)
    for row in rows:
        teaching = row["groups"] - row["groups_equal"] - row["groups_masked"]
        assert teaching == 4 or row["groups"] > 4 * 10
        assert row["reward_value"] + row["reward_wrong"] == 2 * row["groups"]
    assert any(row["groups"] > 4 for row in rows), "two answers to a sum are often both wrong"
    assert run_command(["replay", "out"]) == 0


CODE = "def same(completion, prompt, fields): return 0.5\ndef broken(completion, prompt, fields): raise ValueError"


@pytest.mark.parametrize("name", ["GRPO", "DAPO", "ReinforcePlusPlus"])
def test_equal_rewards_in_every_group_are_said_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "my_rewards.py").write_text(CODE)
    rounds = {"dynamicSampling": {"maxRounds": 2}} if name == "DAPO" else {}
    rewards = [{"name": "same", "entrypoint": "my_rewards:same"}]
    (row,) = run(tmp_path, rewards, steps=1, type=name, overlong={"penalty": 0}, **rounds)
    sampled = 12 if name == "DAPO" else 4
    assert (row["groups"], row["groups_equal"], row["groups_masked"]) == (sampled, sampled, 0)
    assert not row["grad_norm"], "0, or no update at all"
    told = " ".join("".join(capsys.readouterr()).split())
    assert f"nothing to learn from: every advantage is 0; of {sampled} groups {sampled} have equal rewards" in told


def test_a_step_whose_rewards_all_failed_trains_nothing_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(CODE)
    manifest = small_manifest(steps=1)
    manifest["spec"]["environment"] = {
        "failureLimit": 1.0,
        "rewards": [{"name": "broken", "entrypoint": "my_rewards:broken"}],
    }
    manifest["spec"]["algorithm"] |= {"type": "GSPO"}
    (tmp_path / "run.yaml").write_text(json.dumps(manifest))
    assert run_command(["run", "run.yaml", "--out", "out"]) == 0
    row = json.loads((tmp_path / "out/metrics.jsonl").read_text())
    assert (row["groups"], row["groups_equal"], row["groups_masked"], row["grad_norm"]) == (4, 0, 4, None)
