"""Times to look again at objects that are not watched.

They show a queue's decision on a Job, and the reason why a pod or container is not created.
"""

from __future__ import annotations

from orbit_operator.facts import JobFacts, PodFacts

PATIENCE_SECONDS = 10.0
"""Seconds after which something counts as delayed, so that its reason is looked for."""


def look_again(job: JobFacts | None, pod: PodFacts | None, now: float) -> float | None:
    """When to look again at a live attempt whose container does not run yet: at growing intervals.

    Example: an attempt that has waited since 100 is looked at again at 110, 115, 122.5, …
    """
    if job is None or (pod is not None and (pod.started is not None or pod.is_terminal)):
        return None
    since = job.created
    if pod is not None:
        if not pod.node or pod.scheduled is None:
            return None  # The scheduler writes its reason into the pod, which is watched.
        since = pod.scheduled
    return max(since + PATIENCE_SECONDS, now + (now - since) / 2)
