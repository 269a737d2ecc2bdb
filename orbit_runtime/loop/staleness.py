"""Staleness: how many policy versions old a step's tokens are when they are trained on.

Belongs here: measuring it, the bound, and which tokens say nothing about parity. Does not belong here: when a step may
begin, which is what enforces the bound (`steps`).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from orbit_runtime.data.samples import with_column
from orbit_runtime.errors import GateError
from orbit_runtime.types import FLOATS, Group, Sample


@dataclass(frozen=True)
class Staleness:
    """Staleness of the sampled tokens of one step, in policy versions."""

    mean: float
    max: int


def measure_staleness(groups_P: Sequence[Group], version: int) -> Staleness:
    """Args: version: version of the policy that is trained."""
    found: Counter[int] = Counter()
    for group in groups_P:
        for rollout in group.rollouts_G:
            found.update({each: rollout.versions_T.count(each) for each in set(rollout.versions_T) if each >= 0})
    total = found.total()
    if not total:
        return Staleness(0.0, 0)
    return Staleness(sum((version - each) * count for each, count in found.items()) / total, version - min(found))


def check_staleness(staleness: Staleness, limit: int) -> None:
    """Raises GateError (84) above the limit, which the start times of steps should rule out."""
    if staleness.max > limit:
        raise GateError(
            f"a token of this step is {staleness.max} policy versions old",
            where="spec.rollout.maxStaleness",
            fix=f"at most {limit} are allowed; this is a bug in Orbit",
        )


def with_stale(samples_D: Sequence[Sample], groups_P: Sequence[Group], version: int) -> list[Sample]:
    """The samples, with the column `stale` if any token of the step is stale."""
    rollouts = [rollout for group in groups_P for rollout in group.rollouts_G if rollout.trains]
    if all(each in (version, -1) for rollout in rollouts for each in set(rollout.versions_T)):
        return list(samples_D)
    columns = [
        array(FLOATS, [1.0 if 0 <= each < version else 0.0 for each in rollout.versions_T]) for rollout in rollouts
    ]
    return with_column(samples_D, "stale", columns)
