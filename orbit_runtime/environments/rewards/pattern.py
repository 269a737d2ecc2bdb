"""1 if the completion has the form that a regular expression describes, else 0."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any


def pattern(
    completion: str,
    prompt: Sequence[Mapping[str, Any]],
    fields: Mapping[str, Any],
    *,
    pattern: str,
    whole: bool = True,
    most: int | None = None,
) -> float:
    """Searches the completion; `.` matches any character, including line ends.

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
