"""How soon is something looked at again that nobody tells us of?

Belongs here: that one moment. A queue's word on a Job, and why a pod is not made or a container not created, stand in
objects that are not watched. Does not belong here: asking (`observe`), or what follows.
"""

from __future__ import annotations

from orbit_operator.facts import JobFacts, PodFacts

PATIENCE_SECONDS = 10.0
"""What takes longer has a reason."""


def look_again(job: JobFacts | None, pod: PodFacts | None, now: float) -> float | None:
    """When a live attempt whose container does not run yet is looked at again: less and less often.

    Example: it waits since 100: looked at again at 110, 115, 122.5, …
    """
    if job is None or (pod is not None and (pod.started is not None or pod.is_terminal)):
        return None
    since = job.created
    if pod is not None:
        if not pod.node or pod.scheduled is None:
            return None  # The scheduler writes its reasons into the pod, which is watched.
        since = pod.scheduled
    return max(since + PATIENCE_SECONDS, now + (now - since) / 2)
