"""`orbit try`: what a run would begin with and how long it would take, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from orbit_runtime.cli.main import run_command
from orbit_runtime.cli.trial import shorten
from orbit_runtime.spec import OrbitRun
from tests.integration.killing import small_manifest

CLOSE = """
def close(completion, prompt, fields):
    if not completion.isdecimal():
        raise ValueError("no number")
    return -abs(int(completion) - int(fields["answer"]))
"""


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)


def write(made: dict[str, Any]) -> str:
    Path("run.yaml").write_text(yaml.safe_dump(made))
    return "run.yaml"


def left() -> list[str]:
    return sorted(str(Path(folder, name)) for folder, _, names in os.walk(".") for name in names
                  if "__pycache__" not in folder)  # fmt: skip


def test_a_trial_shows_scored_answers_and_the_time_of_the_whole_run_and_keeps_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = small_manifest(steps=40)
    Path("my_rewards.py").write_text(CLOSE)
    made["spec"]["environment"] = {"rewards": [{"name": "close", "entrypoint": "my_rewards:close"}]}
    made["spec"]["evaluation"] = {"everySteps": 5, "environments": [{"name": "a", "prompts": [{"uri": "a.jsonl"}]}]}
    made["spec"]["training"] |= {"stopWhen": {"atLeast": -1}, "schedule": {"type": "Cosine", "warmupSteps": 20}}
    made["spec"]["observability"] = {"notify": [{"url": "http://127.0.0.1:9/nobody"}]}
    assert run_command(["try", write(made), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    spec = made["spec"]
    answers = spec["training"]["promptsPerStep"] * spec["algorithm"]["groupSize"]
    assert (len(facts["answers"]), facts["groups"]) == (answers, spec["training"]["promptsPerStep"])
    rewards = [each["reward"] for each in facts["answers"]]
    known = [reward for reward in rewards if reward is not None]
    assert facts["reward"]["mean"] == pytest.approx(sum(known) / len(known))
    assert (facts["reward"]["low"], facts["reward"]["high"]) == (min(known), max(known))
    assert facts["failed"].get("crash", 0) == rewards.count(None)
    assert 0 < facts["groups_with_signal"] <= facts["groups"]
    assert facts["tokens"]["max"] == max(each["num_tokens"] for each in facts["answers"])
    assert facts["seconds"] > facts["start_seconds"] + 39 * facts["step_seconds"]
    assert left() == ["my_rewards.py", "run.yaml"]


def test_what_a_trial_measured_is_told_by_plan_and_in_the_first_line_of_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORBIT_CACHE", str(tmp_path / "cache"))
    file, made = "run.yaml", small_manifest(steps=3)
    del made["spec"]["training"]["learningRate"], made["spec"]["rollout"]["sampling"]["maxNewTokens"]
    made["spec"]["model"]["maxSequenceLength"] = 40
    write(made)
    assert run_command(["plan", file]) == 0
    said = capsys.readouterr().out
    assert "3 steps; how long they take is unknown until 3 were measured" in said
    assert "rollout.sampling.maxNewTokens is unknown until the run has read its prompts" in said
    assert run_command(["try", file, "--json"]) == 0
    (measured,) = (tmp_path / "cache/paces").iterdir()
    start, step = map(float, measured.read_text().split())
    facts = json.loads(capsys.readouterr().out)
    assert start + 3 * step == pytest.approx(facts["seconds"])
    assert run_command(["plan", file, "--set", "spec.training.steps=4000"]) == 0
    assert "4000 steps, about" in capsys.readouterr().out
    assert run_command(["plan", file, "--set", "spec.algorithm.groupSize=5"]) == 0
    assert "unknown" in capsys.readouterr().out, "of another manifest"
    measured.unlink()
    assert run_command(["run", file, "--out", "run"]) == 0
    said = capsys.readouterr()
    assert "3 steps; how long they take is unknown" in (said.err + said.out).splitlines()[0]
    assert "training.learningRate is not set: this run takes 0.002" in said.err + said.out
    assert "preflight, both sides with an adapter of random values" in said.err + said.out
    assert measured.exists(), "a run measures as well"
    kept = json.loads(Path("run/run.json").read_text())["identity"]
    assert kept["spec.training.learningRate"] == 0.002
    tokens = kept["spec.rollout.sampling.maxNewTokens"]
    assert 8 <= tokens < 40
    assert f"rollout.sampling.maxNewTokens is not set: this run takes {tokens}" in said.err + said.out
    assert run_command(["run", file, "--out", "run", "--set", "spec.training.steps=4"]) == 0
    other = f"spec.rollout.sampling.maxNewTokens={tokens + 1}"
    assert run_command(["run", file, "--out", "run", "--set", "spec.training.steps=5", "--set", other]) != 0
    assert f"maxNewTokens: {tokens} then, {tokens + 1} now" in capsys.readouterr().err


def test_a_trial_is_told_in_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["try", write(small_manifest(steps=40))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 30
    assert sum(line.startswith('"') for line in lines) == 4
    assert any(line.startswith("  reward ") and " tokens: " in line for line in lines)
    assert [line.split()[0] for line in lines if line and not line.startswith(('"', " ", "warning"))][-5:] == [
        "before", "reward", "signal", "length", "40",
    ]  # fmt: skip
    assert lines[-1].startswith("40 steps, about ")
    assert left() == ["run.yaml"]


def test_a_trial_of_demonstrations_has_a_loss_and_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    made = small_manifest(steps=40)
    made["spec"]["algorithm"] = {"type": "SFT"}
    made["spec"]["data"]["prompts"][0]["completionField"] = "answer"
    made["spec"]["data"]["validation"] = {"everySteps": 1}
    del made["spec"]["environment"]
    assert run_command(["try", write(made)]) == 0
    *_, before, last = capsys.readouterr().out.splitlines()
    assert before.startswith("before training: loss ")
    assert last.startswith("40 steps, about ")
    assert left() == ["run.yaml"]


def test_a_reward_that_always_fails_ends_the_trial_as_it_would_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    made = small_manifest(steps=40)
    Path("my_rewards.py").write_text("def close(completion, prompt, fields):\n    return 1 / 0\n")
    made["spec"]["environment"] = {"rewards": [{"name": "close", "entrypoint": "my_rewards:close"}]}
    assert run_command(["try", write(made)]) == 86
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert left() == ["my_rewards.py", "run.yaml"]


def test_a_trial_has_the_schedule_of_the_whole_run() -> None:
    made = small_manifest(steps=40)
    made["spec"]["training"]["schedule"] = {"type": "Linear", "warmupSteps": 20}
    tried = shorten(OrbitRun.model_validate(made)).spec
    assert (tried.training.steps, tried.training.schedule.decay_steps) == (3, 40)
