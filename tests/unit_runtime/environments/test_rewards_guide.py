"""The guide's reward does what the guide says, in a worker, found by its import path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from ruamel.yaml import YAML

from orbit_runtime.environments.rewards import REWARDS
from orbit_runtime.spec.environment import Environment, RewardType
from orbit_runtime.spec.template import render_template
from orbit_runtime.workers.user_code.reward_pool import RewardPool
from orbit_runtime.workers.user_code.reward_protocol import RewardCall, RewardTarget

GUIDE = (Path(__file__).resolve().parents[3] / "docs/guides/rewards.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_reward_of_the_guide_runs_as_its_manifest_says(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(block("python"))
    environment = Environment.model_validate(YAML(typ="safe").load(block("yaml"))["environment"])
    targets = [
        RewardTarget(each.name, each.entrypoint or REWARDS[str(each.type)], each.arguments, each.timeout_seconds)
        for each in environment.rewards
    ]
    with RewardPool(targets, num_workers=1, search_path=[str(tmp_path)]) as pool:
        calls = [RewardCall("close", text, [], {"answer": "46"}) for text in ("46.5", "48", "many")]
        results = pool.score([*calls, RewardCall("exact", " 46\n", [], {"answer": "46"})])
    assert [result.outcome for result in results] == ["value", "value", "wrong", "value"]
    assert [result.value for result in results] == [1.0, 1.0 / 3.0, 0.0, 1.0]


def test_every_shipped_reward_is_in_the_guide() -> None:
    for name in REWARDS:
        assert f"| `{name}` |" in GUIDE


def test_the_manifest_the_template_and_the_code_name_the_same_rewards() -> None:
    assert get_args(RewardType) == tuple(REWARDS)
    template = " ".join(render_template("run.yaml").replace("#", " ").split())
    assert f"[{', '.join(REWARDS)}]" in template
