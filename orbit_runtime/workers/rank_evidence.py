"""What a group of ranks reports about a failed call. Plain values: they travel from the driver to the run.

Belongs here: the facts. Does not belong here: their interpretation (`rank_verdict`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from orbit_runtime.workers.node_watch import LookBack
from orbit_runtime.workers.rank_process import RankFailure

Ending = Literal["done", "failed", "lost", "pending"]


@dataclass(frozen=True, slots=True)
class Sign:
    """What comes before an answer, while ranks make progress with it."""


@dataclass(frozen=True)
class RankEnd:
    """The state of one rank when a call is given up."""

    rank: int
    device: str
    node: str
    ending: Ending
    seen: LookBack | None
    """None if its node does not answer."""
    failure: RankFailure | None = None
    """Set if `ending` is `failed`."""
    said: str = ""
    """Ray's message about a rank that is `lost`."""


@dataclass(frozen=True)
class Evidence:
    """The state of all ranks, and other known facts."""

    method: str
    ranks: tuple[RankEnd, ...] = ()
    patience: float | None = None
    """Seconds without progress after which the call was given up; None if it was not given up for that."""
    lost: str | None = None
    """What else has died, such as Ray's head, and how."""
    stopped: tuple[int, ...] = field(default=())
    """Ranks that were stopped (SIGSTOP) for longer than the group's limit."""
