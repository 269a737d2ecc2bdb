"""The end of a run, and what is left to do then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orbit_operator.actions import (
    Action,
    DeleteJob,
    DeletePod,
    DeleteRun,
    Plan,
    RunEvent,
    SetFinalizer,
    StartCleanup,
    State,
)
from orbit_operator.facts import Observed, PodFacts, RunFacts, Verdict
from orbit_operator.policies.deadlines import active_deadline, waiting_deadline
from orbit_operator.policies.restart import decide_restart
from orbit_operator.policies.suspend import live_pods
from orbit_operator.policies.ttl import expiry
from orbit_operator.recorded_status import read_owner

SKIP_CLEANUP = "orbitrl.dev/skip-artifact-cleanup"
FINALIZER = "orbitrl.dev/artifact-cleanup"
WAITING_DEADLINE = "WaitingDeadlineExceeded"
CLEANUP_SECONDS = 600.0
"""The longest that deleting artifacts may delay the deletion of a run."""


def find_end(run: RunFacts, observed: Observed, now: float, base: State) -> State | None:
    """How the run ends, if it does: as already recorded, with a success, or because no further attempt is allowed."""
    stored = observed.stored
    if stored.holds("Complete"):
        return replace(
            base, phase="Succeeded", reason="Succeeded", outcome=True, message=stored.conditions["Complete"].message
        )
    if stored.holds("Failed"):
        failed = stored.conditions["Failed"]
        owner = read_owner(stored.raw)
        return replace(base, phase="Failed", reason=failed.reason, message=failed.message, owner=owner, outcome=False)
    done = next(
        (attempt for attempt in base.attempts if attempt.verdict and attempt.verdict.result == "Succeeded"), None
    )
    if done is not None:
        why = done.verdict and done.verdict.message
        message = f"the run is complete: {why}" if why else "the run is complete"
        return replace(base, phase="Succeeded", reason="Succeeded", message=message, outcome=True)
    # Another version of the operator may read a manifest differently: that never ends a running pod.
    if all(attempt.is_over for attempt in base.attempts):
        if run.invalid:
            return replace(
                base, phase="Failed", reason="ValidationFailed", message=run.invalid, owner="user", outcome=False
            )
        if base.plan[0] == "False":
            return replace(base, phase="Failed", reason=base.plan[1], message=base.plan[2], owner="user", outcome=False)
    limit = run.lifecycle.active_deadline_seconds
    due = active_deadline(base.attempts, dict(base.retired), limit, now)
    if due is not None and now >= due:
        message = f"the run used its {limit} s of active time; a new run can resume from its last checkpoint"
        return replace(base, phase="Failed", reason="DeadlineExceeded", message=message, owner="user", outcome=False)
    waiting = waiting_deadline(base.attempts, stored, run.lifecycle.waiting_deadline_seconds, now)
    if waiting is not None and now >= waiting:
        reason, message = str(stored.raw.get("reason", "")), str(stored.raw.get("message", ""))
        if reason != WAITING_DEADLINE:
            message = f"no node within {run.lifecycle.waiting_deadline_seconds} s: {reason}: {message}"[:1024]
        owner = read_owner(stored.raw)
        return replace(base, phase="Failed", reason=WAITING_DEADLINE, message=message, owner=owner, outcome=False)
    over = [attempt for attempt in base.attempts if attempt.is_over]
    if over and over[-1] is base.attempts[-1]:
        following = decide_restart(over, base.spent, run.lifecycle, run.uid)
        if following.refused:
            return _refuse(base, following.refused, over[-1].verdict, run)
    return None


def _refuse(base: State, refused: str, last: Verdict | None, run: RunFacts) -> State:
    assert last is not None
    allowed = run.lifecycle.max_user_retries if refused == "RetriesExhausted" else run.lifecycle.max_infra_restarts
    # With no retries allowed, report the user's failure itself: an exhausted budget of zero explains nothing.
    reason = last.reason if refused == "RetriesExhausted" and allowed == 0 else refused
    tail = "" if allowed == 0 else f" ({refused}: {allowed} allowed)"
    return replace(
        base,
        phase="Failed",
        reason=reason,
        message=f"{last.message or last.reason}{tail}",
        owner=last.owner,
        outcome=False,
    )


def finish(run: RunFacts, observed: Observed, now: float, ttl_default: int, state: State) -> Plan:
    finished_at = observed.stored.finished_at if observed.stored.finished_at is not None else now
    due = expiry(finished_at, run.lifecycle, ttl_default)
    stray: tuple[Action, ...] = (*stop([pod for pod in observed.pods if not pod.is_terminal]), *idle_jobs(observed))
    if due is not None and now >= due:
        # A time to live never deletes artifacts, whatever the policy for a manual deletion is.
        release: tuple[Action, ...] = (SetFinalizer(False),) if FINALIZER in run.finalizers else ()
        return Plan((*stray, *release, DeleteRun()), state)
    events: tuple[RunEvent, ...] = ()
    if observed.stored.finished_at is None:
        word = "RunSucceeded" if state.outcome else "RunFailed"
        who = "" if state.owner == "none" else f"{state.owner} must act: {state.reason}: "
        events = (RunEvent(word, who + state.message, not state.outcome),)
    return Plan(stray, state, events, due)


def plan_deletion(run: RunFacts, observed: Observed, now: float, node_lost_seconds: float) -> Plan:
    """Owner references delete the run's objects; only its artifacts need us, and only for a limited time."""
    if FINALIZER not in run.finalizers:
        return Plan()
    assert run.deleting_since is not None
    due = run.deleting_since + CLEANUP_SECONDS
    if run.annotations.get(SKIP_CLEANUP) == "true" or observed.cleanup == "Complete":
        return Plan((SetFinalizer(False),))
    why = f": {observed.cleanup_failure}" if observed.cleanup_failure else ""
    if observed.cleanup == "Failed":
        message = f"what was not deleted stays in {run.artifacts}, and there are no more tries{why}"
        return Plan((SetFinalizer(False),), events=(RunEvent("ArtifactCleanupFailed", message, True),))
    if now >= due:
        message = f"the artifacts were not deleted within {CLEANUP_SECONDS:.0f} s and stay in {run.artifacts}{why}"
        return Plan((SetFinalizer(False),), events=(RunEvent("ArtifactCleanupTimedOut", message, True),))
    live = live_pods(observed, now, node_lost_seconds)
    if live:
        return Plan(stop(live), wake_at=due)
    return Plan(() if observed.cleanup else (StartCleanup(),), wake_at=due)


def keep_finalizer(run: RunFacts) -> tuple[Action, ...]:
    return (SetFinalizer(True),) if run.deletes_artifacts and FINALIZER not in run.finalizers else ()


def idle_jobs(observed: Observed) -> tuple[DeleteJob, ...]:
    """Jobs that no pod will end: held by a queue, or never given a pod. A Job whose pod is gone ends by itself."""
    with_pod = {pod.attempt for pod in observed.pods}
    with_pod |= {attempt.number for attempt in observed.stored.attempts if attempt.pod_uid}
    with_pod |= {job.attempt for job in observed.jobs if job.had_pod}
    return tuple(
        DeleteJob(job.name, job.uid)
        for job in observed.jobs
        if job.finished is None and not job.is_deleting and (job.is_suspended or job.attempt not in with_pod)
    )


def stop(pods: Sequence[PodFacts]) -> tuple[DeletePod, ...]:
    return tuple(dict.fromkeys(DeletePod(pod.name, pod.uid) for pod in pods if not pod.is_deleting))
