"""What is wrong with a run on a machine, as a plan tells it. Does not belong here: finding it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that does not fit or is not supported."""

    message: str
    where: str
    fix: str
    fix_suffices: bool = False
    """With that change nothing of this problem is left; one of memory was seen to fit."""
