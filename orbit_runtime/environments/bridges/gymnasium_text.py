"""Gymnasium environments whose observations can be written as text, directly or by `render_mode="ansi"`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium  # type: ignore[import-not-found, unused-ignore]

from orbit_runtime.workers.user_code.environment_protocol import Step

_COLOURED = re.compile(r"\x1b\[([0-9;]+)m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


class GymnasiumEpisode:
    """`gymnasium.make(name, **arguments)`. A name such as `my_games:Maze-v0` imports the module that registers it.

    With a `Text` action space the completion is the action; with a `Discrete` one, the last whole number in it. A
    completion without an action gets a list of the possible actions in response; the environment does not see it.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self._environment = gymnasium.make(name, **arguments)
        self._invalid = 0

    def reset(self, prompt: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
        """The prompt, with the first observation appended to its last message."""
        observation, _ = self._environment.reset(seed=seed % 2**31)
        *before, last = [dict(message) for message in prompt]
        return [*before, {**last, "content": f"{last['content']}\n\n{self._written(observation)}"}]

    def step(self, completion: str) -> Step:
        action = self._action(completion)
        if action is None:
            self._invalid += 1
            return Step(f"Not an action. {self._actions()}", parts=self._parts())
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        done = bool(terminated or truncated)
        return Step(self._written(observation), float(reward), done, self._parts())

    def close(self) -> None:
        self._environment.close()

    def _action(self, completion: str) -> Any:
        space = self._environment.action_space
        if isinstance(space, gymnasium.spaces.Text):
            return completion.strip() if space.contains(completion.strip()) else None
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise TypeError(f"actions are {space}: text can be an action of a Text or a Discrete space only")
        found = re.findall(r"-?\d+", completion)
        return int(found[-1]) if found and space.contains(int(found[-1])) else None

    def _actions(self) -> str:
        space = self._environment.action_space
        if isinstance(space, gymnasium.spaces.Discrete):
            return f"Answer with a number from {space.start} to {space.start + space.n - 1}."
        return f"Answer with at most {space.max_length} characters, of: {space.characters}"

    def _written(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        if self._environment.render_mode == "ansi":
            return written_colours(str(self._environment.render())).strip()
        return str(observation)

    def _parts(self) -> dict[str, float]:
        return {"invalid_actions": self._invalid}


def written_colours(drawing: str) -> str:
    """Writes a terminal's colours as text, because often only the colour shows where the player is.

    Example: `\\x1b[41mS\\x1b[0mFF` → `[S]FF`; in the colour blue, `R` → `blue(R)`
    """
    return _ESCAPE.sub("", _COLOURED.sub(_written_colour, drawing))


def _written_colour(found: re.Match[str]) -> str:
    codes = [int(code) for code in found[1].split(";") if code]
    if any(40 <= code <= 47 or 100 <= code <= 107 for code in codes):
        return f"[{found[2]}]"
    names = [_COLOURS[code % 10] for code in codes if 30 <= code <= 37 or 90 <= code <= 97]
    return f"{names[0]}({found[2]})" if names else found[2]
