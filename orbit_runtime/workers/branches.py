"""What an environment that asks the policy itself holds in its hands: branches of conversations.

Belongs here: its side of an episode, in its own process: text, and which branch is meant. Does not belong here: tokens,
which only the run holds (`environments.branching`), so that nothing here can change what trains.

Out: `{"ask": {"parent", "first", "count", "messages", "tools"}}`: answers number `first` and up to the branch `parent`
after these messages. In: `{"answers": [{"path", "text", "finish_reason", "is_over"}]}`. A path is the number of the
opening, then the number of each answer on the way.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orbit_runtime.workers.environment_protocol import checked_messages, checked_number

Path = tuple[int, ...]


class Policy:
    """The policy, as `play` is given it. For one episode."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send
        self._numbers: Counter[Path] = Counter()
        """Answers asked for so far, by branch; openings under the empty path."""
        self._waiting: dict[Path, asyncio.Future[Mapping[str, Any]]] = {}

    def begin(self, messages: str | Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Branch:
        """A new conversation. Args: tools: schemas that the chat template shows to the policy."""
        opening = (self._next((), 1),)
        return Branch(self, opening, tuple(checked_messages(messages, "begin")), tuple(map(dict, tools)))

    def hear(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Called by the process that runs the environment."""
        for answer in answers:
            waiting = self._waiting.pop(tuple(answer["path"]), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

    def _next(self, parent: Path, count: int) -> int:
        first = self._numbers[parent]
        self._numbers[parent] += count
        return first

    async def _ask(self, branch: Branch, count: int) -> list[Branch]:
        first = self._next(branch._path, count)
        paths = [(*branch._path, number) for number in range(first, first + count)]
        loop = asyncio.get_running_loop()
        waited = [loop.create_future() for _ in paths]
        self._waiting |= dict(zip(paths, waited, strict=True))
        ask = {"parent": branch._path, "first": first, "count": count}
        self._send({"ask": ask | {"messages": branch._messages, "tools": branch._tools}})
        told = await asyncio.gather(*waited)
        return [branch._after(path, answer) for path, answer in zip(paths, told, strict=True)]


@dataclass(frozen=True)
class Branch:
    """A conversation up to some point. Nothing changes it: what follows is another branch, and several may follow.

    Example: `plans = await policy.begin("Plan.").answers(4)`, then `await plans[0].say("Go on.").answer()`
    """

    _policy: Policy = field(repr=False)
    _path: Path
    """The last answer; after a limit, the answer that would have been the next."""
    _messages: tuple[Mapping[str, Any], ...]
    """What was said after it."""
    _tools: tuple[Mapping[str, Any], ...] = field(repr=False)
    text: str = ""
    """The last answer; empty before the first, and if a limit left no room for it."""
    finish_reason: str = "stop"
    """`stop`, or what cut the last answer off: `length`, or `deadline` for the episode's seconds."""
    is_over: bool = False
    """A limit was reached, or the last answer was cut off: `say` and `answers` give this branch again."""

    def say(self, messages: str | Sequence[Mapping[str, Any]]) -> Branch:
        """This branch with something for the policy to read: chat messages, or text for one user message."""
        if self.is_over:
            return self
        more = checked_messages(messages, "say")
        return Branch(self._policy, self._path, (*self._messages, *more), self._tools)

    async def answers(self, count: int) -> list[Branch]:
        """This branch with each of `count` answers, sampled at the same time, each from random draws of its own.

        Raises:
            ValueError: nothing was said since the last answer, or `count` is below 1.
        """
        if count < 1:
            raise ValueError(f"{count} answers were asked for")
        if self.is_over:
            return [self] * count
        if not self._messages:
            raise ValueError("nothing was said since the last answer: `say` something first")
        return await self._policy._ask(self, count)

    async def answer(self) -> Branch:
        (one,) = await self.answers(1)
        return one

    def _after(self, path: Path, answer: Mapping[str, Any]) -> Branch:
        told = (str(answer["text"]), str(answer["finish_reason"]), bool(answer["is_over"]))
        return Branch(self._policy, path, (), self._tools, *told)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A rollout of an episode: everything from its opening to the last answer of `branch`."""

    branch: Branch
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    """Numbers to keep with the rollout under their names."""


def told_choice(value: Any, cohorts: Sequence[str]) -> list[dict[str, Any]]:
    """What `play` returned, as JSON. Raises TypeError if it is not one `Chosen` for each rollout of the episode."""
    if not isinstance(value, list | tuple) or not all(isinstance(each, Chosen) for each in value):
        raise TypeError("play returns a list of orbit_runtime.environments.Chosen")
    if len(value) != len(cohorts):
        raise TypeError(f"play returned {len(value)} rollouts, and `rollouts` says {len(cohorts)}")
    return [
        {
            "path": each.branch._path,
            "reward": checked_number(each.reward, f"reward of rollout {number}"),
            "parts": {str(name): checked_number(value, f"part {name!r}") for name, value in each.parts.items()},
        }
        for number, each in enumerate(value)
    ]
