"""The code of `docs/guides/agents.md`, in its order; what trains raises the reward."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

GUIDE = (Path(__file__).resolve().parents[2] / "docs/guides/agents.md").read_text(encoding="utf-8")


def test_the_guide_runs_and_its_training_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python[^\n]*\n(.*?)```", GUIDE, re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(block, names)
    rewards = [row["reward_mean"] for row in names["metrics"].extra["history"]]
    assert len(rewards) == names["metrics"].steps == 8
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.2
    assert names["metrics"].loss is not None
    assert (tmp_path / "run" / "report.html").exists()
