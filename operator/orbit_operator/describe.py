"""Describes what a live attempt is doing, and what happened since the status was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orbit_operator.actions import Action, ApplySupport, RunEvent, State
from orbit_operator.facts import Attempt, Observed, Owner, PodFacts, Progress, RunFacts
from orbit_operator.manifests.source import config_map_name
from orbit_operator.policies.failure import find_waiting
from orbit_operator.policies.requeue import tell_unheard

_ENDING_EVENTS = {"Preempted": "RunPreempted", "GPUFault": "GPUFaultDetected", "Stalled": "RunStalled"}

POD_PENDING = ("PodPending", "the Job's pod is being created")


def describe(
    run: RunFacts, observed: Observed, base: State, pod: PodFacts | None, now: float
) -> tuple[State, tuple[Action, ...]]:
    """The state of the newest attempt, and actions that provide what it waits for."""
    attempt = base.attempts[-1]
    job = next((job for job in observed.jobs if job.attempt == attempt.number), None)
    if job is not None and job.is_suspended and (pod is None or not pod.is_deleting):
        return _queued(run, observed, base, f"Job {job.name}"), ()
    if pod is None:
        return _podless(observed, base), ()
    if pod.is_deleting:
        return replace(base, phase="Restarting", reason="PodTerminating", message=f"pod {pod.name} is ending"), ()
    if pod.outlived_since is not None:
        message = f"the run's container has ended; {', '.join(pod.still_running) or 'another container'} still runs"
        return replace(base, phase="Stopping", reason="PodTerminating", message=message), ()
    if (held := _held(base, pod)) is not None:
        return held, (ApplySupport(),) if held.reason == "ConfigurationMissing" else ()
    if attempt.running is None and (held := _held_rank(observed, base)) is not None:
        return held, ()
    state = _at_work(observed, base, pod, tell_unheard(attempt, run.metrics_port, now))
    ours = state.reason == "VolumeMissing" and config_map_name(run.name) in state.message
    return state, (ApplySupport(),) if ours else ()


def describe_ranks(run: RunFacts, observed: Observed, base: State, number: int) -> State:
    """The state of a run whose next attempt waits until the pods of its ranks are placed."""
    if (held := _held_rank(observed, base)) is not None:
        return held
    ranks = next((each for each in observed.ranks if each.attempt == number), None)
    if ranks is not None and ranks.is_suspended:
        return _queued(run, observed, base, f"RayCluster {ranks.name}")
    if ranks is not None and ranks.problem:
        return _refused(base, ranks.problem)
    message = f"attempt {number} is created once the pods of its other nodes are placed"
    return replace(base, reason="RanksPending", message=message)


def events_since(observed: Observed, attempts: Sequence[Attempt]) -> tuple[RunEvent, ...]:
    """Events of the attempts that the status does not contain yet."""
    known = {attempt.number: attempt for attempt in observed.stored.attempts}
    found = []
    for index, attempt in enumerate(attempts):
        if attempt.number not in known:
            # The operator that created it died before posting the event.
            found.append(tell_created(attempt.number, attempts[:index]))
        before = known.get(attempt.number, Attempt(attempt.number))
        if attempt.running is not None and before.running is None and attempt.number > 1:
            found += _resuming(attempt, observed.progress)
        if attempt.checkpoint_step is not None and before.checkpoint_step is None:
            found.append(RunEvent("CheckpointCommitted", f"attempt {attempt.number} has its first durable checkpoint"))
        if attempt.is_over and not before.is_over:
            found += _ending(attempt)
    return tuple(found)


def tell_created(number: int, before: Sequence[Attempt]) -> RunEvent:
    """The event that an attempt was created, and why: always in the same words."""
    last = before[-1] if before else None
    if last is None or last.verdict is None:
        return RunEvent("RunAttemptCreated", f"attempt {number}")
    seen = f"; the last checkpoint seen is of step {last.checkpoint_step}" if last.checkpoint_step else ""
    return RunEvent("RunAttemptCreated", f"attempt {number} after {last.verdict.reason}{seen}")


def _resuming(attempt: Attempt, progress: Progress | None) -> list[RunEvent]:
    """Where a later attempt resumes, as its own pod reports: earlier reports of checkpoints may be older."""
    if progress is None or progress.pod_uid != attempt.pod_uid or progress.resumed_from is None:
        return []
    if progress.resumed_from == 0:
        return [RunEvent("RunStartedAnew", f"attempt {attempt.number} begins at step 0: it found no checkpoint")]
    text = f"attempt {attempt.number} continues after step {progress.resumed_from}"
    return [RunEvent("RunResumedFromCheckpoint", text)]


def _ending(attempt: Attempt) -> list[RunEvent]:
    verdict = attempt.verdict
    assert verdict is not None
    if verdict.result == "Succeeded":
        return []
    if verdict.result == "Stopped":
        why = f" ({verdict.message})" if verdict.message else ""
        text = f"attempt {attempt.number} stopped on request after step {attempt.step}{why}"
        return [RunEvent("RunCheckpointed", text)]
    who = "" if verdict.owner == "none" else f"{verdict.owner} must act: "
    text = f"attempt {attempt.number}: {who}{verdict.reason}: {verdict.message}".removesuffix(": ")
    return [RunEvent(_ENDING_EVENTS.get(verdict.reason, "RunInterrupted"), text, is_warning=True)]


def _queued(run: RunFacts, observed: Observed, base: State, what: str) -> State:
    queue = observed.queue
    # A queue may also take Jobs that do not name one.
    if run.lifecycle.queue_name or queue is not None:
        message = queue.message if queue is not None else f"waiting in queue {run.lifecycle.queue_name}"
        return replace(base, phase="Queued", reason="QueuedByKueue", message=message, owner="cluster")
    message = f"{what} is suspended, and not by the run's manifest"
    return replace(base, phase="Queued", reason="JobSuspended", message=message, owner="user")


def _held(base: State, pod: PodFacts) -> State | None:
    """The state of a run whose pod is not placed or whose container does not start; `None` if nothing is wrong."""
    if pod.gates:
        message = f"the pod is held by its scheduling gates: {', '.join(pod.gates)}"
        return replace(base, phase="Queued", reason="SchedulingGated", message=message, owner="cluster")
    if pod.unschedulable:
        return replace(base, phase="Pending", reason="Unschedulable", message=pod.unschedulable, owner="cluster")
    waiting = find_waiting(pod)
    if waiting is None:
        return None
    reason, owner, message = waiting
    return replace(base, phase="Starting", reason=reason, message=message, owner=owner)


def _at_work(observed: Observed, base: State, pod: PodFacts, unheard: tuple[str, Owner]) -> State:
    attempt, progress = base.attempts[-1], observed.progress
    if progress is not None and progress.pod_uid != pod.uid:
        progress = None
    where = f"attempt {attempt.number} on node {pod.node}" if pod.node else f"attempt {attempt.number}"
    if progress is not None and not progress.is_live:
        return replace(base, phase="Running", reason="Stalled", message=progress.message, owner="cluster")
    if attempt.running is not None:
        return replace(base, phase="Running", reason="Running", message=where)
    if pod.started is not None:
        reason = "EngineWarmup" if progress is not None and progress.phase == "Preflight" else "ModelLoading"
        return replace(base, phase="Starting", reason=reason, message=where + unheard[0], owner=unheard[1])
    if observed.warning:
        return replace(base, phase="Starting", reason="VolumeMissing", message=observed.warning, owner="user")
    return replace(base, phase="Starting", reason="ContainerCreating", message=where)


def _podless(observed: Observed, base: State) -> State:
    """The state while the Job has no live pod. After a while, a warning event tells why none is created."""
    ended = next((pod for pod in observed.pods if pod.attempt == base.attempts[-1].number), None)
    if ended is not None:
        message = f"pod {ended.name} has ended; its Job follows"
        return replace(base, phase="Stopping", reason="PodTerminating", message=message)
    if observed.warning:
        return _refused(base, observed.warning)
    return replace(base, phase="Pending", reason=POD_PENDING[0], message=POD_PENDING[1])


def _refused(base: State, why: str) -> State:
    reason = "QuotaExceeded" if "exceeded quota" in why else "PodRefused"
    return replace(base, phase="Pending", reason=reason, message=why, owner="cluster")


def _held_rank(observed: Observed, base: State) -> State | None:
    """The state of a run of which a pod on another node is not placed or does not start."""
    for rank in observed.rank_pods:
        if not rank.is_deleting and (held := _held(base, rank)) is not None:
            return replace(held, message=f"pod {rank.name} on another of the run's nodes: {held.message}")
    return None
