"""The code of `docs/guides/agents.md`, in its order; what trains raises the reward, with either algorithm."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.agents import RewardSpec, VeRLAlgorithm, VeRLConfig, VeRLTrainer
from orbit_runtime.model_info.builtin_models import builtin_folder

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


def test_ppo_learns_and_its_rewards_see_their_items(tmp_path: Path) -> None:
    config = VeRLConfig(
        algorithm=VeRLAlgorithm.PPO,
        batch_size=8,
        epochs=2,
        learning_rate=5e-3,
        max_new_tokens=4,
        max_sequence_length=32,
        out=str(tmp_path / "run"),
    )
    prompts = [{"prompt": f"{a}+{b}=", "first": "1"} for a in (11, 25, 47, 63) for b in (12, 18, 31, 44)]

    def starts(output: str, item: dict[str, str]) -> float:
        return float(output.startswith(item["first"]))

    metrics = asyncio.run(VeRLTrainer(config, [RewardSpec("starts", 1.0, starts)]).train(prompts))
    assert metrics.reward is not None
    assert metrics.reward > metrics.extra["reward_first"] + 0.2
    assert "value_loss" in metrics.extra["history"][-1]


def test_a_model_of_ones_own_is_trained(tmp_path: Path) -> None:
    """A folder as from a model hub, whose chat template comes with it."""
    folder = tmp_path / "model"
    shutil.copytree(builtin_folder("tiny-adder", "BF16"), folder)
    config = VeRLConfig(
        model=str(folder), batch_size=2, epochs=1, max_new_tokens=4, max_sequence_length=32, out=str(tmp_path / "run")
    )
    metrics = asyncio.run(
        VeRLTrainer(config, [RewardSpec("long", 1.0, lambda output: float(len(output)))]).train(["1+2="])
    )
    assert metrics.reward is not None
    resolved = json.loads((tmp_path / "run" / "run.json").read_text())["resolved"]["spec"]
    assert resolved["model"]["uri"] == str(folder)
    assert (tmp_path / "run/adapters/policy-v1/manifest.json").exists()
