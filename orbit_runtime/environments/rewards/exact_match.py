"""1 if the completion is the expected text, else 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def exact_match(
    completion: str, prompt: Sequence[Mapping[str, str]], fields: Mapping[str, Any], *, field: str = "answer"
) -> float:
    """Compares with column `field`, ignoring white space at both ends."""
    return float(completion.strip() == str(fields[field]).strip())
