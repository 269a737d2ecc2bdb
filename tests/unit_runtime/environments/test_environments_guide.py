"""The guide's tool and environment do what the guide says, in their processes, found by their import paths."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from orbit_runtime.environments.tools.calculator import calculate
from orbit_runtime.spec.environment import Environment
from orbit_runtime.workers.environment_pool import EnvironmentPool
from orbit_runtime.workers.environment_protocol import EnvironmentTarget, ToolResult

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


def test_every_environment_of_the_guide_is_allowed() -> None:
    assert [each.type for each in environments()] == ["MultiTurn", "MultiTurn", "Gymnasium"]


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
