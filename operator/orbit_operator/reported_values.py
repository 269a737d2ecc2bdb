"""A pod may report anything about itself: each value is taken if it is plausible, else it becomes `None`.

A value that the API server refuses would prevent the run's whole status from being written.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from orbit_runtime.spec.status import LARGEST_NUMBER, MAX_COUNT


def read_count(said: Mapping[str, Any], name: str) -> int | None:
    """A whole number between 0 and the largest that a status holds."""
    value = said.get(name)
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value <= MAX_COUNT else None  # type: ignore[operator]


def read_number(said: Mapping[str, Any], name: str) -> float | None:
    """A finite number within the bounds of a status."""
    value = said.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with contextlib.suppress(OverflowError):
        number = float(value)
        if math.isfinite(number) and abs(number) <= LARGEST_NUMBER:
            return number
    return None


def read_seconds(said: Mapping[str, Any], name: str) -> float | None:
    """A time in seconds; a status holds whole seconds."""
    number = read_number(said, name)
    return number if number is not None and 0 <= number <= MAX_COUNT else None


def read_text(said: Mapping[str, Any], name: str, longest: int) -> str | None:
    """At most `longest` characters, all of which UTF-8 can encode: JSON may contain lone surrogates (`\\ud800`)."""
    value = said.get(name)
    return value[:longest].encode("utf-8", "replace").decode() if isinstance(value, str) else None
