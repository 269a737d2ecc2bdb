"""Environments and tools that misbehave in every way a user's can."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from orbit_runtime.environments import Step
from orbit_runtime.workers.child.process import frame


class ByText:
    """Does what the completion, or the prompt, says."""

    def __init__(self, word: str = "go on") -> None:
        self._word = word

    def reset(self, prompt: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], seed: int) -> Any:
        if fields.get("reset") == "nothing":
            return None
        return _do(str(fields.get("reset", ""))) or [*prompt]

    def step(self, completion: str) -> Any:
        if completion == "done":
            return Step(reward=1.0, done=True, parts={"letters": len(completion)})
        return _do(completion) or Step(self._word, reward=0.25)


class Late:
    async def reset(self, prompt: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], seed: int) -> str:
        await asyncio.sleep(0.01)
        return f"seed {seed}"

    async def step(self, completion: str) -> Step:
        await asyncio.sleep(0.01)
        return Step("again")

    def finish(self) -> float:
        return 0.5


class NoReset:
    def step(self, completion: str) -> Step:
        return Step(done=True)


class NoSeed(ByText):
    def reset(self, prompt: Sequence[Mapping[str, Any]]) -> Any:  # type: ignore[override]  # the mistake
        return None


class NoPrompt:
    async def play(self, policy: Any) -> list[Any]:
        return []


class Delegates:
    """Has its methods from another object."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ByText(), name)


class Assigns:
    def __init__(self) -> None:
        self.reset, self.step = ByText().reset, ByText().step


class Static:
    @staticmethod
    def reset(prompt: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], seed: int) -> None: ...

    @classmethod
    def step(cls, completion: str) -> Step:
        return Step(done=True)


def _do(what: str) -> Any:
    actions = {
        "raise": lambda: 1 / 0,
        "exit": lambda: sys.exit(4),
        "die": lambda: os._exit(3),
        "hang": lambda: time.sleep(3600),
        "spin": _spin,
        "memory": lambda: len(bytearray(1 << 32)),
        "fork": os.fork,
        "print": lambda: print("x" * (8 << 20)),
        "end at once": lambda: Step(done=True, reward=0.5),
        "a number": lambda: 3,
        "no role": lambda: Step([{"content": "a"}]),
        "nan": lambda: Step("a", reward=float("nan")),
        "text as reward": lambda: Step("a", reward="good"),  # type: ignore[arg-type]
        "much": lambda: Step("a" * (2 << 20)),
        "not json": lambda: Step([{"role": "user", "content": [{"type": "image", "image": object()}]}]),
        "nothing to say": Step,
        "half a character": lambda: "a\ud800b",
        "rubbish": lambda: _write_answer(b"rubbish"),
        "an answer": lambda: _write_answer(frame(b'{"messages": [], "reward": 1.0, "done": true}')),
    }
    return actions[what]() if what in actions else None


def _write_answer(data: bytes) -> None:
    """Writes to the socket that the process answers through."""
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, data)


def _spin() -> None:
    while True:
        pass


def add(a: int, b: int = 0) -> int:
    """Adds two numbers.

    Args:
        a: the first.
        b (int): the second.

    Returns:
        Their sum.
    """
    return a + b


async def slow(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "waited"


def act(what: str) -> Any:
    """Does it."""
    return _do(what) or {"did": what}


not_callable = 3
