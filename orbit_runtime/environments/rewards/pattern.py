"""1 where the completion has the form that a regular expression describes."""

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
    """Searches; `.` is any character, line ends included.

    Args:
        whole: all of the completion, white space at both ends left out; else anywhere in it.
        most: more places than these are 0 as well: a form that stands there twice is not the form.
    """
    compiled = _compile(pattern)
    if whole:
        return float(compiled.fullmatch(completion.strip()) is not None)
    found = sum(1 for _ in compiled.finditer(completion))
    return float(found > 0 and (most is None or found <= most))


@lru_cache(maxsize=32)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)
