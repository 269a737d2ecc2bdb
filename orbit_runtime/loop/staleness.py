"""Staleness: how many policy versions old a step's tokens are when they are trained on.

Belongs here: measuring it, the bound, and which tokens say nothing about parity. Does not belong here: when a step may
begin, which is what enforces the bound (`steps`).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from orbit_runtime.data.samples import with_column
from orbit_runtime.errors import GateError
from orbit_runtime.types import FLOATS, Group, Rollout, Sample


@dataclass(frozen=True)
class Staleness:
    """Staleness of the sampled tokens of one step, in policy versions."""

    mean: float
    max: int


def measure_staleness(groups_P: Sequence[Group], version: int) -> Staleness:
    """Args: version: version of the policy that is trained."""
    found: Counter[int] = Counter()
    for group in groups_P:
        counts = np.bincount(_versions(group.rollouts_G) + 1)[1:]
        found.update({each: int(counts[each]) for each in np.flatnonzero(counts).tolist()})
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
    trained_PG = [[rollout for rollout in group.rollouts_G if rollout.trains] for group in groups_P]
    if all(((versions == version) | (versions < 0)).all() for versions in map(_versions, trained_PG)):
        return list(samples_D)
    columns = []
    for rollouts_G in trained_PG:
        versions = _versions(rollouts_G)
        stale: array[float] = array(FLOATS, ((versions >= 0) & (versions < version)).astype(np.float32).tobytes())
        end = 0
        for rollout in rollouts_G:
            start, end = end, end + len(rollout.versions_T)
            columns.append(stale[start:end])
    return with_column(samples_D, "stale", columns)


def _versions(rollouts: Iterable[Rollout]) -> np.ndarray:
    """int32: the versions of all their tokens, one rollout after the other."""
    return np.frombuffer(b"".join(rollout.versions_T for rollout in rollouts), np.int32)
