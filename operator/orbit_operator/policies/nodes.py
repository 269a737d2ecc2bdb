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
    has_ranks = any(each.attempt == current.number for each in observed.ranks)
    return (CreateRanks(current.number),) if has_job and not has_ranks else ()


def are_placed(run: RunFacts, observed: Observed, number: int) -> bool:
    """Whether the head and the ranks of an attempt are each on a node: until then, the run's own pod takes no GPU."""
    uids = {each.uid for each in observed.ranks if each.attempt == number and not each.is_deleting}
    placed = [pod for pod in observed.rank_pods if pod.job_uid in uids and pod.node and not pod.is_terminal]
    return run.nodes == 1 or len(placed) >= run.nodes


def unused_ranks(observed: Observed, attempts: Sequence[Attempt], awaited: int = 0) -> tuple[DeleteRanks, ...]:
    """RayClusters to delete: of attempts that are over and whose pod has ended, and not awaited by the next attempt."""
    used = {pod.attempt for pod in observed.pods if not pod.is_terminal} | {awaited}
    used |= {attempt.number for attempt in attempts if not attempt.is_over}
    return tuple(
        DeleteRanks(each.name, each.uid) for each in observed.ranks if each.attempt not in used and not each.is_deleting
    )
