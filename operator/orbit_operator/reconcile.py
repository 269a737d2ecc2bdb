"""One pass over one run: observe → plan → apply → status."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from orbit_operator.actions import Plan, RunEvent, StartCleanup, State
from orbit_operator.api import ApiError, Body
from orbit_operator.apply import LASTING, NameTakenError, Writer, explain_refusal
from orbit_operator.cache import Key
from orbit_operator.crd_check import drop_fields
from orbit_operator.events import Recorder
from orbit_operator.facts import Observed, RecordedStatus, RunFacts
from orbit_operator.metrics import Metrics, build_text
from orbit_operator.observe import Observer
from orbit_operator.plan import Limits, needs_fresh_look, plan
from orbit_operator.status import build_status, is_progress_only
from orbit_operator.timestamps import read_time


@dataclass(frozen=True)
class Parts:
    """The parts that a pass uses."""

    observer: Observer
    writer: Writer
    recorder: Recorder
    metrics: Metrics
    limits: Limits
    progress_seconds: float
    ask: Callable[[Key], Awaitable[None]]
    """Polls the run's pod now."""
    clock: Callable[[], float] = time.time


async def reconcile(key: Key, parts: Parts) -> float | None:
    """Makes one pass; returns the seconds until time alone calls for another, or `None` if it never does."""
    now = parts.clock()
    seen = await parts.observer.look(key, now)
    if seen is None:
        parts.metrics.runs.pop(key, None)
        parts.observer.forget(key)
        return None
    run, body, observed = seen
    chosen = plan(run, observed, now, parts.limits, run.plan)
    if needs_fresh_look(chosen, observed):
        await parts.ask(key)
        seen = await parts.observer.look(key, now, fresh=True)
        if seen is None:
            return None
        run, body, observed = seen
        chosen = plan(run, observed, now, parts.limits, run.plan)
    if chosen.state is None:
        # The run is being deleted and may be gone after the next action: post its events first.
        for event in chosen.events:
            await parts.recorder.post(run, event)
        chosen = replace(chosen, events=())
    state, events, refused = await _act(chosen, run, body, observed.stored, parts)
    # Before the status: events that the status implies are not posted again after a crash.
    for event in events:
        await parts.recorder.post(run, event)
    written = await _write(run, body, observed, state, now, parts)
    if refused is not None:
        raise refused
    due = [written, None if chosen.wake_at is None else max(0.0, chosen.wake_at - now)]
    return min((each for each in due if each is not None), default=None)


async def _write(
    run: RunFacts, body: Body, observed: Observed, state: State | None, now: float, parts: Parts
) -> float | None:
    """Writes the status if it is due; else returns the seconds until it is, or `None` if it never is."""
    if state is None:
        return None
    status = drop_fields(build_status(run, observed, state, now), parts.writer.crd_lacks)
    parts.metrics.runs[run.key] = build_text(*run.key, body.get("spec") or {}, status, run.gpus)
    due = write_due(observed.stored, status, now, parts.progress_seconds)
    if due != 0.0:
        return due
    await parts.writer.write_status(run, body, status)
    return None


async def _act(
    chosen: Plan, run: RunFacts, body: Body, stored: RecordedStatus, parts: Parts
) -> tuple[State | None, tuple[RunEvent, ...], Exception | None]:
    """Carries out the actions up to the first that is refused, if any; the state then says why nothing happens."""
    state = chosen.state
    for action in chosen.actions:
        try:
            state = await parts.writer.carry_out(action, run, body, state)
        except (ApiError, NameTakenError) as error:
            if isinstance(action, StartCleanup) and isinstance(error, ApiError) and error.status in LASTING:
                message = f"the Job that deletes the artifacts cannot be created: {error.message}"[:1024]
                return state, (RunEvent("ArtifactCleanupRefused", message, is_warning=True),), error
            told = None if state is None else explain_refusal(action, error, state)
            if told is None:
                raise
            events = tuple(event for event in chosen.events if event.reason != "RunAttemptCreated")
            if (stored.raw.get("reason"), stored.raw.get("message")) != (told.reason, told.message):
                events = (*events, RunEvent("FailedToCreateRunAttempt", told.message, is_warning=True))
            return told, events, error
    return state, chosen.events, None


def write_due(stored: RecordedStatus, status: dict[str, object], now: float, patience: float) -> float | None:
    """Seconds until this status should be written: 0 for now, `None` if it need not be."""
    if stored.raw == status:
        return None
    if not is_progress_only(stored.raw, status):
        return 0.0
    written = read_time(stored.raw.get("lastReportTime"))
    if written is None or status.get("lastReportTime") == stored.raw.get("lastReportTime"):
        # No report since the last write; GPU time that merely passes is not worth a write.
        return 0.0 if written is None and "lastReportTime" in status else None
    return max(0.0, written + patience - now)
