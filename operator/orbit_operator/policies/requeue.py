"""Times to look again at objects that are not watched, and at what nobody has acted on.

They show a queue's decision on a Job, and the reason why a pod or container is not created.
"""

from __future__ import annotations

from dataclasses import replace

from orbit_operator.facts import Attempt, JobFacts, Owner, PodFacts

PATIENCE_SECONDS = 10.0
"""Seconds after which something counts as delayed, so that its reason is looked for."""
UNSEEN = "no scheduler has looked at the pod: check that the one that `placement.pod.schedulerName` names, if any, runs"

UNHEARD_SECONDS = 300.0
"""Seconds after its container's start by which a pod should have answered: a run opens its port before it loads."""


def look_again(job: JobFacts | None, pod: PodFacts | None, now: float) -> float | None:
    """When to look again at a live attempt whose container does not run yet: at growing intervals.

    Example: an attempt that has waited since 100 is looked at again at 110, 115, 122.5, …
    """
    if job is None or (pod is not None and (pod.started is not None or pod.is_terminal)):
        return None
    if pod is not None and (pod.unschedulable or pod.gates):
        return None  # The scheduler writes its reason into the pod, which is watched.
    since = job.created if pod is None else pod.created if pod.scheduled is None else pod.scheduled
    return max(since + PATIENCE_SECONDS, now + (now - since) / 2)


def tell_unseen(pod: PodFacts, now: float) -> PodFacts:
    """The pod, with why it waits if no scheduler has said anything of it for a while."""
    is_seen = pod.node or pod.gates or pod.unschedulable or pod.is_terminal or now - pod.created < PATIENCE_SECONDS
    return pod if is_seen else replace(pod, unschedulable=UNSEEN)


def tell_unheard(attempt: Attempt, port: int | None, now: float) -> tuple[str, Owner]:
    """Why nothing is known of an attempt whose container runs, and who must act; no words while nothing is wrong.

    Args: port: at which its pod is polled; `None` if it opens none.
    """
    if attempt.answered is not None or attempt.started is None or now < attempt.started + UNHEARD_SECONDS:
        return "", "none"
    if port is None:
        return "; nothing is known of it before it ends (observability.metricsPort: -1)", "none"
    return (
        f"; it has not answered the operator at port {port} within {UNHEARD_SECONDS:.0f} s and may still train: "
        "see what keeps the operator from its pod, such as a NetworkPolicy or a service mesh",
        "cluster",
    )
