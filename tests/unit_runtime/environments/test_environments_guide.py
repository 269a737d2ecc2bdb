"""The guide's tool and environment do what the guide says, in their processes, found by their import paths."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from orbit_runtime.environments.branching import Branching
from orbit_runtime.environments.episodes import EpisodeLimits, EpisodeSettings
from orbit_runtime.environments.tools.calculator import calculate
from orbit_runtime.spec.environment import Environment
from orbit_runtime.types import Completion, Prompt, Rollout, Sampling
from orbit_runtime.workers.user_code.environment_pool import EnvironmentPool
from orbit_runtime.workers.user_code.environment_protocol import EnvironmentTarget, ToolResult
from orbit_runtime.workers.user_code.reward_pool import RewardThreads
from tests.unit_runtime.environments.test_multi_turn import END, Written

GUIDE = (Path(__file__).resolve().parents[3] / "docs/guides/environments.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def environments() -> list[Environment]:
    return [Environment.model_validate(YAML(typ="safe").load(text)["environment"]) for text in blocks("yaml")]


def test_the_tools_of_the_guide_are_called_as_its_manifest_says(tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(blocks("python")[0])
    spec = environments()[0]
    with EnvironmentPool(EnvironmentTarget(tools=spec.tools), search_path=[str(tmp_path)]) as pool:
        assert [tool["function"]["name"] for tool in pool.tools] == ["convert", "calculate"]
        assert asyncio.run(pool.call_tool("convert", {"value": 2, "unit": "km"})) == ToolResult("2000 m")
        assert asyncio.run(pool.call_tool("convert", {"value": 2, "unit": "mile"})).is_error


def test_the_environment_of_the_guide_is_played_as_its_manifest_says(tmp_path: Path) -> None:
    (tmp_path / "my_games.py").write_text(blocks("python")[1])
    spec = environments()[1]

    async def play(pool: EnvironmentPool) -> tuple[str, list[dict[str, Any]]]:
        episode = pool.open_episode()
        try:
            first = await episode.reset([{"role": "system", "content": "Play."}], {}, 3)
            return str(first["messages"][-1]["content"]), [await episode.step(str(guess)) for guess in range(1, 6)]
        finally:
            await episode.close()

    target = EnvironmentTarget(spec.entrypoint, spec.arguments)
    with EnvironmentPool(target, search_path=[str(tmp_path)]) as pool:
        asked, steps = asyncio.run(play(pool))
    assert asked == "Guess a number from 1 to 5."
    (won,) = [step for step in steps if step["done"]]
    assert won["reward"] == 1.0
    words = {step["messages"][0]["content"]: step["reward"] for step in steps if not step["done"]}
    assert set(words) <= {"higher", "lower"}
    assert set(words.values()) == {-0.1}


class Replies:
    """A policy that gives these texts in turn, and ends each."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.read: list[str] = []

    async def sample(self, prompt_ids_T: Any, sampling: Sampling, *, key: int) -> Completion:
        self.read.append("".join(map(chr, prompt_ids_T)))
        text = self.texts.pop(0)
        ids = [*map(ord, text), END]
        return Completion(0, ids, [-0.5] * len(ids), [0] * len(ids), "stop", text)  # type: ignore[arg-type]


def search(folder: Path, name: str, policy: Replies, *, arguments: dict[str, Any] | None = None) -> list[Rollout]:
    """One episode of a class of the guide's third file, in its process."""
    (folder / "my_searches.py").write_text(blocks("python")[2])
    prompt = Prompt("p", 0, ({"role": "user", "content": "12+34="},), {"answer": "46"})
    target = EnvironmentTarget(f"my_searches:{name}", arguments or {})
    with EnvironmentPool(target, search_path=[str(folder)]) as pool, RewardThreads([]) as scorer:
        assert pool.cohorts is not None
        settings = EpisodeSettings("run", Sampling(), EpisodeLimits(), len(pool.cohorts), 0, True)
        environment = Branching(settings, Written(), scorer, {}, pool.open_episode, pool.cohorts)
        (episode,) = environment.build_episodes([prompt], 1)
        return list(asyncio.run(environment.play(episode, policy)).rollouts)


def test_the_best_of_the_guide_is_trained_and_the_rest_is_counted(tmp_path: Path) -> None:
    (spec,) = [each for each in environments() if each.entrypoint == "my_searches:BestOf"]
    (best,) = search(tmp_path, "BestOf", Replies("45", "46", "4", "x"), arguments=spec.arguments)
    assert (best.turns[-1].text, best.reward, best.counts) == ("46", 1.0, {"tokens_unchosen": 3 + 2 + 2})


def test_the_tree_of_the_guide_trains_each_answer_for_what_came_of_it(tmp_path: Path) -> None:
    policy = Replies("40", "45", "46", "46", "46", "9")
    found = search(tmp_path, "Tree", policy)
    assert [each.reward for each in found] == [1.0, 0.5, 1.0, 1.0, 1.0, 0.0]
    assert [each.cohort for each in found] == ["first"] * 2 + ["second"] * 4
    trained = ["".join(chr(token) for token, flag in zip(each.token_ids_T, each.loss_mask_T, strict=True) if flag)
               for each in found]  # fmt: skip
    assert trained == [text + chr(END) for text in ("40", "45", "46", "46", "46", "9")]
    assert all(read.endswith("[assistant]") for read in policy.read)
    assert ["40" in read for read in policy.read] == [False, False, True, True, False, False]


def test_the_players_of_the_guide_read_each_others_moves(tmp_path: Path) -> None:
    policy = Replies("3", "3", "3", "1")
    begins, follows = search(tmp_path, "Nim", policy)
    assert (begins.reward, follows.reward) == (0.0, 1.0)
    assert [turn.text for turn in begins.turns if turn.role == "assistant"] == ["3", "3"]
    assert [turn.text for turn in follows.turns if turn.role == "assistant"] == ["3", "1"]
    assert "3 taken, 7 left." in policy.read[1]
    assert "3 taken, 7 left." not in policy.read[2]
    begins, follows = search(tmp_path, "Nim", Replies("3", "many"))
    assert (begins.reward, follows.reward) == (1.0, 0.0)


def test_every_environment_of_the_guide_is_allowed() -> None:
    assert [each.type for each in environments()] == ["MultiTurn", "MultiTurn", "MultiTurn", "Gymnasium"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*34", "408"),
        (" (12+34)*5 ", "230"),
        ("-7//2", "-4"),
        ("1/3", "0.333333333333"),
        ("7%4", "3"),
        ("1.5+1", "2.5"),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize("expression", ["2**9", "open('x')", "a", "1,2", "'a'*9", "True", "1j", "", "1/0", "9" * 400])
def test_the_calculator_computes_nothing_else(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError)):
        calculate(expression)
