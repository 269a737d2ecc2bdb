"""What a group of ranks tells of a call that failed. Plain values: they travel from the driver to the run.

Belongs here: the facts. Does not belong here: what they mean (`rank_verdict`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from orbit_runtime.workers.node_watch import LookBack
from orbit_runtime.workers.rank_process import RankFailure

Ending = Literal["done", "failed", "lost", "pending"]


@dataclass(frozen=True)
class RankEnd:
    """How one rank stands when a call is given up."""

    rank: int
    device: str
    node: str
    ending: Ending
    seen: LookBack | None
    """None where its node does not answer."""
    failure: RankFailure | None = None
    """Of one that `failed`."""
    said: str = ""
    """Ray's words on one that is `lost`."""


@dataclass(frozen=True)
class Evidence:
    """All ranks, and what else is known."""

    method: str
    ranks: tuple[RankEnd, ...] = ()
    patience: float | None = None
    """Seconds without progress after which the call was given up; None: it was not given up for that."""
    lost: str | None = None
    """What else has died, such as Ray's head, and how."""
    stopped: tuple[int, ...] = field(default=())
    """Ranks that stood stopped (SIGSTOP) until patience with them ended."""
