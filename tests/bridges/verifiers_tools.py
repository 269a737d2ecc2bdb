"""A ToolEnv of verifiers, as a package of the Environments Hub defines one."""

from __future__ import annotations

import verifiers as vf  # type: ignore[import-not-found]
from datasets import Dataset  # type: ignore[import-untyped]


def double(x: int) -> int:
    """Doubles a number.

    Args:
        x: the number.
    """
    return 2 * x


def is_right(completion: object, answer: str, **_: object) -> float:
    assert isinstance(completion, list)
    return float(str(completion[-1]["content"]) == answer)


def load_environment() -> vf.Environment:
    rows = [{"prompt": [{"role": "user", "content": "double 21"}], "answer": "42"}]
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[double], rubric=vf.Rubric(funcs=[is_right]), max_turns=4)
