"""An environment package of verifiers, as its users write them; `vf-eval orbit_sums` finds it by its name."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def load_environment(count: int = 4) -> vf.Environment:
    rows = [{"question": f"{number}+{number}=", "answer": str(2 * number)} for number in range(1, count + 1)]

    def correct(completion: list[dict[str, Any]], answer: str, **_: Any) -> float:
        return float(completion[-1]["content"].strip() == answer)

    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[correct]))
