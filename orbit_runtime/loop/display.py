"""The display of a running run: terminal, status port and metrics, fed from one place."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orbit_runtime.errors import StoppedOnRequest
from orbit_runtime.loop.collect import MAX_STOPPED, CollectedStep
from orbit_runtime.loop.keep import checkpoint_prefix, stopped_name
from orbit_runtime.loop.state import RunState
from orbit_runtime.observability.metrics import MetricsRow, RunMetrics
from orbit_runtime.observability.progress import Progress
from orbit_runtime.observability.status import LiveStatus
from orbit_runtime.observability.trackers import Tracking
from orbit_runtime.workers.child.signals import StopFlag


class RunDisplay:
    """The run's displays. Call them from the loop's thread only, except for `stopping`."""

    def __init__(
        self, progress: Progress, status: LiveStatus, metrics: RunMetrics, *, keeps_rollouts: bool = False
    ) -> None:
        """Args: keeps_rollouts: whether a stop keeps the rollouts of an incomplete step."""
        self.keeps_rollouts = keeps_rollouts
        self.progress = progress
        self.status = status
        self.metrics = metrics
        self.trackers: Sequence[Tracking] = ()
        self.current = "start"
        """The run's current stage."""
        self.step_now: int | None = None
        """The step that the stage belongs to; None during the start."""
        self.start_times: StartTimes | None = None
        self.stop: StopFlag | None = None
        """Until the first step, no stage begins once it is set."""

    def stage(self, name: str, step: int | None = None) -> None:
        """A stage begins.

        Raises:
            StoppedOnRequest: (75) a stop was requested during the stage of the start that has just ended.
        """
        self.check(f"before this began: {name}")
        if self.start_times:
            self.start_times.stage(name)
        self.current = name
        self.step_now = step
        self.status.update(stage=name)
        self.progress.stage(name)

    def check(self, when: str = "") -> None:
        """Raises StoppedOnRequest (75) if a stop was requested during the start."""
        if self.stop:
            when = when or f"during this: {self.current}"
            raise StoppedOnRequest(f"{self.stop.reason} {when}; the same command starts again")

    def note(self, message: str, **facts: Any) -> None:
        self.progress.note(message, **facts)

    def stopping(self) -> None:
        """Announces at once what a stop request leads to. Safe to call from any thread."""
        self.progress.note(stop_sentence(self.current, self.step_now, keeps_rollouts=self.keeps_rollouts))

    def step(self, row: MetricsRow, state: RunState) -> None:
        self.status.observe(row)
        self.checkpoint(state)
        self.metrics.observe(row)
        self.metrics.set_progress(time.time())
        self.progress.step(row)
        self._track(row)

    def evaluation(self, row: MetricsRow) -> None:
        """Shows the evaluation after this row's step; the step itself may have been shown already."""
        self.metrics.observe_evaluation(row)
        self.metrics.set_progress(time.time())
        self._track(row)

    def _track(self, row: MetricsRow) -> None:
        for tracker in self.trackers:
            tracker.row(row)

    def checkpoint(self, state: RunState) -> None:
        """Shows the newest durable step."""
        kept = state.checkpoint_step
        if kept:
            self.status.update(last_checkpoint_step=kept, last_checkpoint=checkpoint_prefix(kept))

    def target(self, total: int, resumed_at: int) -> None:
        self.stop = None  # From here on the loop decides, which may have a step to finish.
        self.metrics.set_target(total)
        self.progress.start(total=total, resumed_at=resumed_at)


class StartTimes:
    """Seconds of each stage from the claim of the run folder to the first rollouts."""

    def __init__(
        self, tell: Callable[[Mapping[str, float]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Args: tell: receives the seconds by stage, once, when the first rollouts are there."""
        self._tell: Callable[[Mapping[str, float]], None] | None = tell
        self._clock = clock
        self._name, self._since = "opening the run folder", clock()
        self._seconds: dict[str, float] = {}

    def stage(self, name: str) -> None:
        """Begins a stage, or continues one that had been left: its times are added."""
        if self._tell is None:
            return
        now = self._clock()
        self._seconds[self._name] = round(self._seconds.get(self._name, 0.0) + now - self._since, 3)
        # `loading the model, 1.2 GiB`: what it is, without how much there is of it.
        self._name, self._since = "first rollouts" if name == "collect" else name.split(",")[0], now
        if name == "train":
            tell, self._tell = self._tell, None
            tell(self._seconds)


def stop_sentence(stage: str, step: int | None, *, keeps_rollouts: bool = False) -> str:
    """Example: `stopping: finishing step 12 (train) first; press Ctrl-C again to drop it`"""
    if step is None:
        return f"stopping as soon as this is done: {stage}; press Ctrl-C again to end it at once"
    if stage == "collect" and keeps_rollouts:
        return "stopping: the rollouts of later steps are kept, finished or not"
    if stage == "collect":
        return f"stopping: step {step} is dropped, as its rollouts are not complete; the steps before it are kept"
    if stage == "evaluate":
        return f"stopping: the evaluation after step {step} continues when the run does"
    return f"stopping: finishing step {step} ({stage}) first; press Ctrl-C again to drop it"


def show_timeouts(show: RunDisplay, step: int, collected: CollectedStep) -> None:
    """Names the stages that stopped and the file with the evidence; silent if no episode stopped."""
    if not collected.stopped:
        return
    stages = Counter((each.stage, each.reason) for each in collected.stopped)
    told = "; ".join(f"{stage}: {reason} ({count} times)" for (stage, reason), count in stages.most_common(3))
    which = f"of the first {MAX_STOPPED} " if len(collected.stopped) == MAX_STOPPED else ""
    show.note(
        f"step {step}: episodes stopped and are masked: {told}; stacks and texts {which}are in {stopped_name(step)}"
    )
