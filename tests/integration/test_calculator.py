"""The example of a tool, scaled down: a model calls a calculator in its first turn, and repeats it in its second."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from orbit_runtime.data.records import decompress_rollouts
from orbit_runtime.loop import run
from orbit_runtime.spec import parse_manifest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "calculator.yaml"
CALL = re.compile(r'<tool_call>\{"name":"calculate","arguments":\{"expression":"(\d\d\*\d\d)"\}\}</tool_call>')


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_policy_calls_a_tool_reads_its_answer_and_trains_on_what_it_sampled(tmp_path: Path) -> None:
    small = ["training.steps=2", "training.promptsPerStep=4", "algorithm.groupSize=8"]
    manifest = parse_manifest(EXAMPLE.read_text(), name="calculator.yaml", overrides=small, environ={})
    run(manifest, out=str(tmp_path / "out"))
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["reward_value"] for row in rows] == [32, 32]
    assert all(row["tool_calls"] > row["tool_errors"] > 0 for row in rows), "some calls are right, and some are not"
    assert all(1.0 < row["turns_mean"] <= 2.0 for row in rows)
    assert all(row["parity_max"] < 1e-3 for row in rows), "the trainer finds the log-probs of every turn again"
    rollouts = decompress_rollouts((tmp_path / "out" / "rollouts" / "step-000001.jsonl.zst").read_bytes())
    right = [each for each in rollouts if len(each.turns) == 4 and CALL.fullmatch(each.turns[1].text)]
    assert right
    for each in right:
        left, factor = map(int, CALL.fullmatch(each.turns[1].text)[1].split("*"))  # type: ignore[index]
        assert each.turns[2].role == "tool"
        assert each.turns[2].text == str(left * factor)
        trained = [turn.role for turn in each.turns for flag in each.loss_mask_T[turn.start : turn.end] if flag]
        assert set(trained) == {"assistant"}
        assert sum(each.loss_mask_T) == sum(turn.end - turn.start for turn in each.turns if turn.role == "assistant")
    assert any(each.reward == 1.0 for each in right)
