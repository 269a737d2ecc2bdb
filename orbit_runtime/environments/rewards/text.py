"""Rewards that only look at the completion's text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
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
    """1 if the completion chooses the expected letter, else 0. Column `field` holds a letter of `choices`.

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


def exact_match(
    completion: str, prompt: Sequence[Mapping[str, str]], fields: Mapping[str, Any], *, field: str = "answer"
) -> float:
    """1 if the completion is the text in column `field`, ignoring white space at both ends, else 0."""
    return float(completion.strip() == str(fields[field]).strip())


def length(
    completion: str,
    prompt: Sequence[Mapping[str, Any]],
    fields: Mapping[str, Any],
    *,
    free: int,
    limit: int,
    unit: str = "characters",
) -> float:
    """0 up to `free`, -1 from `limit` on, linear between.

    The form of DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, equation 13), which counts tokens; a
    reward sees text.

    Args:
        unit: `characters` or `words`.

    Example: with `free=100, limit=200` a completion of 150 characters is worth -0.5.
    """
    if unit not in ("characters", "words"):
        raise ValueError(f"unit is 'characters' or 'words', not {unit!r}")
    if not 0 <= free < limit:
        raise ValueError(f"free ({free}) is below limit ({limit})")
    size = len(completion) if unit == "characters" else len(completion.split())
    return -min(1.0, max(0.0, (size - free) / (limit - free)))


def pattern(
    completion: str,
    prompt: Sequence[Mapping[str, Any]],
    fields: Mapping[str, Any],
    *,
    pattern: str,
    whole: bool = True,
    most: int | None = None,
) -> float:
    """1 if the completion has the form of a regular expression, else 0; `.` matches any character, including line ends.

    Args:
        whole: match the whole completion without white space at both ends; otherwise search anywhere in it.
        most: maximum number of matches; with more, the score is 0, because a repeated form is not the form.
    """
    compiled = _compile(pattern)
    if whole:
        return float(compiled.fullmatch(completion.strip()) is not None)
    found = sum(1 for _ in compiled.finditer(completion))
    return float(found > 0 and (most is None or found <= most))


@lru_cache(maxsize=32)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)
