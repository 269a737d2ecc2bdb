"""What a run shows while it runs: terminal, status port and metrics, fed from one place.

Belongs here: passing the same facts to every display. Does not belong here: how they look (`observability`).
"""

from __future__ import annotations

import time
from typing import Any

from orbit_runtime.loop.keep import checkpoint_prefix
from orbit_runtime.loop.state import RunState
from orbit_runtime.observability.metrics import MetricsRow, RunMetrics
from orbit_runtime.observability.progress import Progress
from orbit_runtime.observability.status import RunStatus


class Show:
    """The run's displays. Safe to call from the loop's thread only."""

    def __init__(self, progress: Progress, status: RunStatus, metrics: RunMetrics) -> None:
        self.progress = progress
        self.status = status
        self.metrics = metrics
        self.current = "start"
        """The stage that the run is in."""

    def stage(self, name: str, step: int | None = None) -> None:
        self.current = name
        self.status.update(stage=name)
        self.progress.stage(name)

    def note(self, message: str, **facts: Any) -> None:
        self.progress.note(message, **facts)

    def step(self, row: MetricsRow, state: RunState) -> None:
        self.status.observe(row)
        self.checkpoint(state)
        self.metrics.observe(row)
        self.metrics.set_progress(time.time())
        self.progress.step(row)

    def checkpoint(self, state: RunState) -> None:
        """The newest step that is durable."""
        kept = state.checkpoint_step
        if kept:
            self.status.update(last_checkpoint_step=kept, last_checkpoint=checkpoint_prefix(kept))

    def target(self, total: int, resumed_at: int) -> None:
        self.metrics.set_target(total)
        self.progress.start(total=total, resumed_at=resumed_at)
