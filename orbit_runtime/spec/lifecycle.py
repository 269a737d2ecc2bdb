"""`spec.lifecycle`: when a run on a cluster starts, pauses, is tried again and is forgotten.

Only the operator reads this block; `orbit run` accepts it and starts at once, so one file does for both. On a cluster
`suspend`, `queueName` (while suspended) and `ttlSecondsAfterFinished` may change after the run was created, and nothing
else of its spec.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from orbit_runtime.spec.block import DISPLAY, Block, LabelValue

LONGEST_SECONDS = 2**31 - 1
MANAGER_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?$"


class Lifecycle(Block):
    """The lifecycle of the run on a cluster; has no effect elsewhere."""

    suspend: Annotated[bool, DISPLAY] = False
    """`true` stops the run at a checkpoint and releases its GPUs; `false` continues it from there."""
    queue_name: Annotated[LabelValue | None, DISPLAY, Field(min_length=1, examples=["team-a"])] = None
    """Kueue LocalQueue that decides when the run may start; if unset, no queue."""
    managed_by: Annotated[
        str | None,
        DISPLAY,
        Field(min_length=3, max_length=63, pattern=MANAGER_PATTERN, examples=["kueue.x-k8s.io/multikueue"]),
    ] = None
    """Another controller that runs this object, such as `kueue.x-k8s.io/multikueue`; if unset, Orbit's operator."""
    ttl_seconds_after_finished: Annotated[int | None, DISPLAY, Field(ge=0, le=LONGEST_SECONDS)] = None
    """The object is deleted this long after its run ended; the content of `storage.uri` stays. If unset, never."""
    active_deadline_seconds: Annotated[int | None, DISPLAY, Field(ge=1, le=LONGEST_SECONDS)] = None
    """Total time that the run's pods may take, not counting waiting and suspension; if unset, no limit."""
    startup_deadline_seconds: Annotated[int | None, DISPLAY, Field(ge=1, le=LONGEST_SECONDS)] = None
    """Time from the placement of an attempt's pod to its first step: images, model, warm-up. If unset, no limit."""
    termination_grace_period_seconds: Annotated[int, DISPLAY, Field(ge=1, le=86_400)] = 300
    """Time for a last checkpoint before the pod is killed."""
    max_user_retries: Annotated[int, DISPLAY, Field(ge=0, le=100)] = 0
    """New attempts after failures that the manifest or the user's code caused."""
    max_infra_restarts: Annotated[int, DISPLAY, Field(ge=0, le=1000)] = 10
    """New attempts after failures of node, GPU, network or store."""
