"""Rewards that misbehave in every way a user's can."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orbit_runtime.workers.user_code.reward_protocol import WrongAnswer

Prompt = Sequence[Mapping[str, str]]


def by_text(completion: str, prompt: Prompt, fields: Mapping[str, Any], *, scale: float = 1.0) -> Any:
    """Does what the completion says."""
    actions = {
        "raise": lambda: 1 / 0,
        "nan": lambda: float("nan"),
        "inf": lambda: float("inf"),
        "text": lambda: "good",
        "none": lambda: None,
        "true": lambda: True,
        "numpy's true": lambda: __import__("numpy").bool_(True),
        "hang": lambda: time.sleep(3600),
        "spin": _spin,
        "die": lambda: os._exit(3),
        "exit": lambda: exit(4),
        "chat": _chat,
        "rubbish": lambda: _write_results(b"rubbish\n"),
        "an answer": lambda: _write_results(b'["value", 1.0, "", 0.1]\n'),
        "taken once more": lambda: _write_results(b'{"taken": true}\n'),
        "more results": lambda: _write_results(b'["value", 1.0, "", 0.1]\n' * 9),
        "a result of none": lambda: _write_results(b'["value", null, "", 0.1]\n'),
        "a result of NaN": lambda: _write_results(b'["value", NaN, "", 0.1]\n'),
        "an object": lambda: _write_results(b'{"error": {}}\n'),
        "no line's end": lambda: _write_results(b"x" * (1 << 25)),
    }
    if completion == "wrong":
        raise WrongAnswer("no number in it")
    if completion in actions:
        return actions[completion]()
    print("a reward may print", completion)
    return scale * len(completion)


def _chat() -> float:
    """Prints four megabytes, as Python does and as a program that it starts does."""
    print("the first words")
    for _ in range(2):
        print("x" * (1 << 20))
        subprocess.run(["head", "-c", str(1 << 20), "/dev/zero"], check=True)
    return 1.0


def _write_results(data: bytes) -> None:
    """Writes to the pipe that the worker answers through; its number is the worker's second argument."""
    fd = int(Path("/proc/self/cmdline").read_text().split("\0")[-4])
    for start in range(0, len(data), 4096):
        os.write(fd, data[start : start + 4096])
    time.sleep(3600)


def leaves_a_child(completion: str, prompt: Prompt, fields: Mapping[str, Any], *, file: str) -> float:
    """Starts a process in a session of its own, whose parent is gone, and then does what the completion says."""
    subprocess.run(["sh", "-c", 'setsid sleep 600 >/dev/null 2>&1 & printf %s $! > "$0"', file], check=True)
    if completion == "it exits":
        os._exit(3)
    if completion == "it overstays":
        time.sleep(3600)
    return 1.0


def asks_for_a_key(completion: str, prompt: Prompt, fields: Mapping[str, Any]) -> float:
    """Reads the variable `MY_API_KEY` as a user's code does, or as a client of an API does."""
    if completion == "by its name":
        return float(len(os.environ["MY_API_KEY"]))
    if not os.environ.get("MY_API_KEY"):
        raise ValueError("set the MY_API_KEY environment variable")
    return 1.0


def _spin() -> None:
    while True:
        pass


class Late:
    """Async where no signature of a function says so."""

    async def __call__(self, completion: str, prompt: Prompt, fields: Mapping[str, Any]) -> float:
        return 1.0


late = Late()


async def never(completion: str, prompt: Prompt, fields: Mapping[str, Any]) -> float:
    return 1.0


def yields(completion: str, prompt: Prompt, fields: Mapping[str, Any]) -> Iterator[float]:
    yield 1.0


def too_few(completion: str) -> float:
    return 1.0
