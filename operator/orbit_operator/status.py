"""Turns a state into the OrbitRun's whole `status`, which is applied once per pass.

Belongs here: conditions, and which fact goes into which field. Does not belong here: reading it back
(`recorded_status`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from orbit_operator.actions import State
from orbit_operator.facts import Attempt, Condition, Observed, RunFacts, Verdict
from orbit_operator.policies.deadlines import STARTING_PHASES, active_seconds
from orbit_operator.timestamps import format_time

CONDITIONS = (
    "PlanAccepted", "Admitted", "PodScheduled", "ModelReady", "EnginesReady", "Progressing", "CheckpointFresh",
    "GPUHealthy", "Suspended", "Interrupted", "Succeeded", "Complete", "Failed",
)  # fmt: skip
"""Every status contains all of them, in this order."""
STALE_CHECKPOINTS = 2
"""The newest checkpoint is stale once this many due checkpoints did not become durable."""

Truth = Literal["True", "False", "Unknown"]
Judgement = tuple[Truth, str, str]


def build_status(run: RunFacts, observed: Observed, state: State, now: float) -> dict[str, Any]:
    """The whole `status`. Equal inputs give an equal status: `now` only dates what changes."""
    stored = observed.stored
    conditions = build_conditions(run, observed, state, now)
    attempt = state.attempts[-1] if state.attempts else None
    finished = stored.finished_at if stored.finished_at is not None else (now if state.outcome is not None else None)
    status: dict[str, Any] = {
        "observedGeneration": run.generation,
        "phase": state.phase,
        "reason": state.reason,
        "message": state.message,
        "whoActs": state.owner.capitalize(),
        "attempt": attempt.number if attempt else 0,
        "node": attempt.node if attempt else "",
        "startTime": _time(_first(state.attempts, "scheduled")),
        "completionTime": _time(finished),
        "nextAttemptTime": _time(state.next_at),
        "userRetries": state.spent.user,
        "infraRestarts": state.spent.infra,
        "freeRestarts": state.spent.free,
        "activeSeconds": round(active_seconds(state.attempts, dict(state.retired), now)),
        "gpuSeconds": {name: round(getattr(state.seconds, name)) for name in ("useful", "lost", "waiting")},
        "attempts": [_attempt(each) for each in state.attempts],
        "retired": {name: round(value) for name, value in state.retired} or None,
        "conditions": [_condition(conditions[kind]) for kind in CONDITIONS],
        **_progress(observed, run),
    }
    return _set(status)


def build_conditions(run: RunFacts, observed: Observed, state: State, now: float) -> dict[str, Condition]:
    """Every condition; a condition whose status did not change keeps its transition time."""
    judged = _judge(run, observed, state)
    built = {}
    for kind in CONDITIONS:
        truth, reason, message = judged[kind]
        before = observed.stored.conditions.get(kind)
        since = before.since if before is not None and before.status == truth else now
        built[kind] = Condition(kind, truth, reason, message, since, run.generation)
    return built


def _judge(run: RunFacts, observed: Observed, state: State) -> dict[str, Judgement]:
    attempt = state.attempts[-1] if state.attempts else None
    lives = attempt is not None and not attempt.is_over
    trains = lives and attempt is not None and attempt.running is not None
    idle: Judgement = ("Unknown", "NoPod", "")
    ended: Judgement | None = None
    if state.outcome is not None:
        ended = ("False", "Succeeded" if state.outcome else state.reason, "")
    why: Judgement = ("False", state.reason, state.message)
    loading = lives and attempt is not None and attempt.started is not None
    model: Judgement = ("True", "Loaded", "") if trains else why if loading else idle
    engines: Judgement = ("True", "Ready", "") if trains else why if loading else idle
    progressing: Judgement = ("True", "Running", "") if trains and state.reason != "Stalled" else why
    return {
        "PlanAccepted": (_truth(state.plan[0]), state.plan[1], state.plan[2]),
        "Admitted": _admitted(run, observed, state, lives),
        "PodScheduled": _scheduled(attempt, state, lives),
        "ModelReady": ended or model,
        "EnginesReady": ended or engines,
        "Progressing": ended or progressing,
        "CheckpointFresh": _fresh(run, attempt, lives),
        "GPUHealthy": _gpu(observed, attempt, trains),
        "Suspended": _suspended(observed, state),
        "Interrupted": _interrupted(state, attempt, lives),
        "Succeeded": _outcome(state, ("True", "False")),
        "Complete": ("True", "Succeeded", state.message) if state.outcome else ("False", state.reason, ""),
        "Failed": ("True", state.reason, state.message) if state.outcome is False else ("False", state.reason, ""),
    }


def _outcome(state: State, words: tuple[Truth, Truth]) -> Judgement:
    if state.outcome is None:
        return "Unknown", state.reason, state.message
    return words[0] if state.outcome else words[1], state.reason, state.message


def _admitted(run: RunFacts, observed: Observed, state: State, lives: bool) -> Judgement:
    if not run.lifecycle.queue_name and observed.queue is None:
        return "True", "NoQueue", ""
    if state.phase == "Queued":
        reason = observed.queue.reason if observed.queue is not None else "QueuedByKueue"
        return "False", reason, state.message
    return ("True", "Admitted", "") if lives else ("Unknown", "NoJob", "")


def _scheduled(attempt: Attempt | None, state: State, lives: bool) -> Judgement:
    if attempt is None or not lives:
        waits = state.phase in ("Pending", "Queued")
        return ("False", state.reason, state.message) if waits else ("Unknown", "NoPod", "")
    return ("True", "Scheduled", f"on node {attempt.node}") if attempt.node else ("False", state.reason, state.message)


def _fresh(run: RunFacts, attempt: Attempt | None, lives: bool) -> Judgement:
    if attempt is None or attempt.checkpoint_step is None:
        return "Unknown", "NoCheckpoint", ""
    behind = attempt.step - attempt.checkpoint_step
    if lives and behind > STALE_CHECKPOINTS * run.checkpoint_every:
        return "False", "CheckpointStale", f"{behind} steps since the last durable checkpoint"
    return "True", "Committed", ""


def _gpu(observed: Observed, attempt: Attempt | None, trains: bool) -> Judgement:
    if attempt is not None and attempt.verdict is not None and attempt.verdict.reason == "GPUFault":
        return "False", "GPUFault", attempt.verdict.message
    node = observed.nodes.get(attempt.node) if attempt is not None else None
    if node is not None and node.problems:
        return "False", "GPUFault", f"node {node.name}: {', '.join(node.problems)}"
    return ("True", "NoFaultSeen", "") if trains else ("Unknown", "NotTraining", "")


def _suspended(observed: Observed, state: State) -> Judgement:
    if state.phase == "Suspended":
        return "True", "Suspended", state.message
    if state.phase == "Suspending":
        return "False", "Suspending", state.message
    before = observed.stored.conditions.get("Suspended")
    resumed = before is not None and (before.status == "True" or before.reason == "Resumed")
    return "False", "Resumed" if resumed else "NotSuspended", ""


def _interrupted(state: State, attempt: Attempt | None, lives: bool) -> Judgement:
    if state.phase == "Restarting":
        return "True", state.reason, state.message
    over = attempt is not None and attempt.verdict is not None and attempt.verdict.result == "Failed"
    if over and not lives and state.outcome is None and attempt is not None and attempt.verdict is not None:
        return "True", attempt.verdict.reason, attempt.verdict.message
    return "False", "NotInterrupted", ""


def _progress(observed: Observed, run: RunFacts) -> dict[str, Any]:
    """The pod's last report; fields that it omits keep their values."""
    before = observed.stored.raw
    kept = {name: before[name] for name in PROGRESS_FIELDS if name in before}
    fresh = observed.progress
    if fresh is None:
        return {"steps": run.total_steps, **kept}
    checkpoint = kept.get("checkpoint")
    if fresh.checkpoint_step is not None and fresh.checkpoint_step != (checkpoint or {}).get("step"):
        checkpoint = _set({"step": fresh.checkpoint_step, "uri": fresh.checkpoint, "time": format_time(fresh.at)})
    values = {
        "step": fresh.step,
        "steps": fresh.total or run.total_steps,
        "reward": _rounded(fresh.reward),
        "parity": _set({"value": _rounded(fresh.parity), "limit": _rounded(fresh.parity_limit)}) or None,
        "policyVersion": fresh.policy_version,
        "adapterDigest": fresh.adapter_digest,
        "checkpoint": checkpoint,
        "best": _set(
            {"step": fresh.best_step, "evaluation": fresh.best_evaluation, "value": _rounded(fresh.best_value)}
        )
        or None,
        "tokensPerSecond": _rounded(fresh.tokens_per_second),
        "secondsLeft": None if fresh.eta_seconds is None else round(fresh.eta_seconds),
        "execution": fresh.execution,
        "lastReportTime": format_time(fresh.at),
    }
    if fresh.phase in STARTING_PHASES and fresh.step < kept.get("step", 0):
        del values["step"]  # The pod has not read the checkpoint yet from which it resumes.
    return {**kept, **_set(values)}


PROGRESS_FIELDS = (
    "step", "steps", "reward", "parity", "policyVersion", "adapterDigest", "checkpoint", "best",
    "tokensPerSecond", "secondsLeft", "execution", "lastReportTime",
)  # fmt: skip
"""Fields that only a pod can fill. A change in these alone is written less often."""


def _attempt(attempt: Attempt) -> dict[str, Any]:
    checkpoint = {"step": attempt.checkpoint_step, "time": _time(attempt.checkpoint_at)}
    return _set(
        {
            "number": attempt.number,
            "jobUID": attempt.job_uid,
            "podUID": attempt.pod_uid,
            "pod": attempt.pod,
            "node": attempt.node,
            "createTime": _time(attempt.created),
            "scheduleTime": _time(attempt.scheduled),
            "startTime": _time(attempt.started),
            "answerTime": _time(attempt.answered),
            "runTime": _time(attempt.running),
            "step": attempt.step,
            "checkpoint": _set(checkpoint) or None,
            "earlierSeconds": round(attempt.earlier_seconds) or None,
            "ending": None if attempt.verdict is None else _ending(attempt.verdict, attempt.ended),
        }
    )


def _ending(verdict: Verdict, ended: float | None) -> dict[str, Any]:
    return _set(
        {
            "time": _time(ended),
            "result": verdict.result,
            "reason": verdict.reason,
            "message": verdict.message,
            "whoActs": verdict.owner.capitalize(),
            "budget": verdict.budget.capitalize(),
            "exitCode": verdict.exit_code,
            "avoidNode": verdict.avoid_node or None,
        }
    )


def _condition(condition: Condition) -> dict[str, Any]:
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message,
        "lastTransitionTime": format_time(condition.since),
        "observedGeneration": condition.generation,
    }


def is_progress_only(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether the two differ only in what the pod reports about itself and in the GPU time that passed."""
    return _settled(before) == _settled(after)


def _settled(status: Mapping[str, Any]) -> dict[str, Any]:
    moving = {*PROGRESS_FIELDS, "gpuSeconds", "activeSeconds"}
    settled = {name: value for name, value in status.items() if name not in moving}
    steps = ("step", "checkpoint")
    settled["attempts"] = [
        {name: value for name, value in attempt.items() if name not in steps}
        for attempt in status.get("attempts") or ()
    ]
    return settled


def _first(attempts: tuple[Attempt, ...], name: str) -> float | None:
    return next((getattr(attempt, name) for attempt in attempts if getattr(attempt, name) is not None), None)


def _set(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The known fields: an absent field means unknown, and the API server refuses null."""
    return {name: value for name, value in fields.items() if value is not None and value != ""}


def _truth(word: str) -> Truth:
    return "True" if word == "True" else "False" if word == "False" else "Unknown"


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else format_time(seconds)


def _rounded(value: float | None) -> float | None:
    """Six significant digits, enough for a reader; more would make every status differ from the last."""
    return None if value is None else float(f"{value:.6g}")
