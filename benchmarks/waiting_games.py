"""Environments that only wait before they answer: any additional time is the loop's.

Belongs here: what the benchmarks' environments do. Does not belong here: measuring (`episodes`, `pipelined`).
"""

from __future__ import annotations

import time
from typing import Any

from orbit_runtime.environments import Step


class WaitingGame:
    """Answers each of `turns` completions after `seconds`; the reward is 1 if the last one has an odd length."""

    def __init__(self, seconds: float, turns: int) -> None:
        self._seconds, self._left = seconds, turns

    def reset(self, prompt: Any, fields: Any, seed: int) -> None:
        return None

    def step(self, completion: str) -> Step:
        time.sleep(self._seconds)
        self._left -= 1
        if self._left:
            return Step("1+2=")
        # Differs within a group, so that every step has a gradient.
        return Step(reward=float(len(completion) % 2), done=True)


def half(completion: str, prompt: Any, fields: Any) -> float:
    """A reward that costs nothing."""
    return 0.5
