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
