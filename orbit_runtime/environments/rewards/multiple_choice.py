"""1 if the completion chooses the expected letter, else 0."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from orbit_runtime.workers.user_code.reward_protocol import WrongAnswer


def multiple_choice(
    completion: str,
    prompt: Sequence[Mapping[str, Any]],
    fields: Mapping[str, Any],
    *,
    field: str = "answer",
    choices: str = "ABCDEFGHIJ",
) -> float:
    """Column `field` holds a letter of `choices`.

    The completion's choice is the last of `\\boxed{B}` or `answer: B` (also `answer is (B)`, `**B**`); without one, a
    letter that stands alone on the last line. Raises WrongAnswer if it chooses nothing.
    """
    expected = str(fields[field]).strip().upper()
    if len(expected) != 1 or expected not in choices:
        raise ValueError(f"column {field!r} is no letter of {choices}: {fields[field]!r}")
    letter = f"([{re.escape(choices)}])"
    before = r"\\boxed\{\s*(?:\\text\{)?|(?i:answer)(?i:\s+is)?\s*[:=]?\s*[(*\s]*"
    said = re.findall(rf"(?:{before}){letter}(?![A-Za-z0-9])", completion)
    if not said:
        last = completion.strip().rpartition("\n")[2]
        said = re.findall(rf"(?<![A-Za-z0-9]){letter}(?![A-Za-z0-9'])", last)
        if len(said) != 1:
            raise WrongAnswer("the completion chooses no letter")
    return float(said[-1] == expected)
