"""Decides when a run over several nodes takes the nodes for its ranks, and when it releases them."""

from __future__ import annotations

from collections.abc import Sequence

from orbit_operator.actions import CreateRanks, DeleteRanks
from orbit_operator.facts import Attempt, Observed, RunFacts


def missing_ranks(run: RunFacts, observed: Observed, attempts: Sequence[Attempt]) -> tuple[CreateRanks, ...]:
    """RayClusters to create for the live attempt: once its Job exists, and again if somebody deleted the cluster."""
    current = attempts[-1] if attempts else None
    if run.nodes == 1 or observed.ranks_problem or current is None or current.is_over:
        return ()
    has_job = any(
        job.attempt == current.number and job.finished is None and not job.is_deleting for job in observed.jobs
    )
    if not has_job or any(each.attempt == current.number for each in observed.ranks):
        return ()
    return (CreateRanks(current.number),)


def unused_ranks(observed: Observed, attempts: Sequence[Attempt]) -> tuple[DeleteRanks, ...]:
    """RayClusters to delete: those of attempts that are over and whose pod has ended, as their GPUs would be idle."""
    used = {pod.attempt for pod in observed.pods if not pod.is_terminal}
    used |= {attempt.number for attempt in attempts if not attempt.is_over}
    return tuple(
        DeleteRanks(each.name, each.uid) for each in observed.ranks if each.attempt not in used and not each.is_deleting
    )
