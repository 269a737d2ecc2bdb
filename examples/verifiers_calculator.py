"""An environment of the package verifiers, as its users write them: a tool, a rubric, and whoever asks is answered."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

from orbit_runtime.environments.tools.calculator import calculate


def is_product(completion: list[Any], answer: str, **_: Any) -> float:
    """1 where the last message is the answer, else 0."""
    return float(str(completion[-1]["content"]).strip() == answer)


def load_environment(turns: int = 2) -> vf.Environment:
    """What `vf-eval verifiers_calculator` loads, and Orbit."""
    # Orbit asks with the prompts of the manifest; `vf-eval` with these.
    rows = [{"question": f"{number}*{number + 1}=", "answer": str(number * (number + 1))} for number in range(10, 90)]
    rubric = vf.Rubric(funcs=[is_product])
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[calculate], rubric=rubric, max_turns=turns)
