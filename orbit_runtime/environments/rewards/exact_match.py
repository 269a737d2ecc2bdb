"""1 where the completion is the expected text, 0 where it is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def exact_match(
    completion: str, prompt: Sequence[Mapping[str, str]], fields: Mapping[str, Any], *, field: str = "answer"
) -> float:
    """Compares with column `field`, white space at both ends left out."""
    return float(completion.strip() == str(fields[field]).strip())
