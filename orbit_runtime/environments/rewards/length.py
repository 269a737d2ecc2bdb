"""A length penalty: 0 for a short enough completion, then falling linearly to -1.

The form of DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, equation 13), which counts tokens; a
reward sees text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


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
