"""A problem of a run on a machine, as a plan reports it. Does not belong here: finding problems."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that does not fit or is not supported."""

    message: str
    where: str
    fix: str
    fix_suffices: bool = False
    """Whether the fix resolves this problem completely; for memory, the changed run was checked to fit."""
