"""The example of code against tests learns: programs of a policy, each in a sandbox of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orbit_runtime.data.records import decompress_rollouts
from orbit_runtime.loop import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import load_manifest
from orbit_runtime.workers.user_code.sandbox import run_program

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "code.yaml"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_policy_learns_to_write_functions_that_pass_their_tests(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(load_manifest(EXAMPLE, ["spec.training.steps=10"]), out=str(out), progress=SilentProgress())
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward_mean"] for row in rows]
    assert sum(rewards[-3:]) / 3 - sum(rewards[:3]) / 3 >= 0.08, rewards
    assert all(row["reward_crash"] == row["reward_timeout"] == 0 for row in rows), "a program that is wrong is no fault"
    rollouts = decompress_rollouts((out / "rollouts" / "step-000010.jsonl.zst").read_bytes())
    right = [each for each in rollouts if each.reward == 1.0]
    assert right
    for each in right[:8]:
        question, program = (turn.text for turn in each.turns)
        assert run_program(f"{program}\n{another_test(question)}").ended == "done", program


def another_test(question: str) -> str:
    """Test of an argument that the prompt's tests do not try, worked out from the question alone."""
    value = 5
    for name, number in (step.split() for step in question.removeprefix("f(x): x ").split(", ")):
        value = {"plus": value + int(number), "minus": value - int(number), "times": value * int(number)}[name]
    return f"assert f(5) == {value}"
