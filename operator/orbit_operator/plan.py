"""Decides what should happen to a run now. Pure: (run, observed, now) → actions, status, events, and when to look
again.

Belongs here: the order of the decisions. Does not belong here: the rule for each decision (`policies`), the wording of
the status (`status`), or doing anything (`apply`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orbit_operator.actions import Action, CreateAttempt, CreateRanks, DeleteJob, DeletePod, Plan, RunEvent, State
from orbit_operator.attempts import fold_attempts, newest_pod, retire
from orbit_operator.describe import POD_PENDING, describe, describe_ranks, events_since, tell_created
from orbit_operator.ending import find_end, finish, idle_jobs, keep_finalizer, plan_deletion, stop
from orbit_operator.facts import Observed, PodFacts, RunFacts
from orbit_operator.policies.accounting import account_all
from orbit_operator.policies.deadlines import active_deadline, startup_deadline, waiting_deadline
from orbit_operator.policies.failure import STARTUP_DEADLINE
from orbit_operator.policies.nodes import are_placed, missing_ranks, unused_ranks
from orbit_operator.policies.requeue import PATIENCE_SECONDS, look_again
from orbit_operator.policies.restart import decide_restart, num_spent
from orbit_operator.policies.suspend import GRACE_AFTER_END, is_stranded, live_pods, node_wake

MANAGER = "orbitrl.dev/orbit-operator"
RECONCILE = "orbitrl.dev/reconcile"
FORMER_RUN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that the operator's settings impose on every run."""

    node_lost_seconds: float = 300.0
    ttl_seconds: int = -1


def plan(run: RunFacts, observed: Observed, now: float, limits: Limits, verdict: tuple[str, str, str]) -> Plan:
    """Makes the plan of one pass.

    Args:
        verdict: the planner's verdict on the manifest: status, reason and message of `PlanAccepted`.
    """
    if not is_ours(run):
        return Plan()
    if run.deleting_since is not None:
        chosen = plan_deletion(run, observed, now, limits.node_lost_seconds)
        return replace(chosen, actions=(*chosen.actions, *unused_ranks(observed, ())))
    attempts = fold_attempts(observed, now, limits.node_lost_seconds, run.lifecycle)
    listed, retired = retire(attempts, dict(observed.stored.retired), run.gpus, now)
    spent = num_spent(listed, retired)
    base = State(
        "Pending", "Pending", attempts=listed, retired=tuple(sorted(retired.items())), spent=spent,
        seconds=account_all(listed, retired, run.gpus, now), plan=verdict,
    )  # fmt: skip
    chosen = _choose(run, observed, now, limits, base)
    surplus = [DeleteJob(job.name, job.uid) for job in observed.jobs
               if job.attempt <= retired.get("through", 0) and not job.is_deleting]  # fmt: skip
    keep = () if observed.stored.finished_at is not None else keep_finalizer(run)
    unused = unused_ranks(observed, listed, chosen.waits_for_ranks)
    ranks: tuple[Action, ...] = (*unused, *missing_ranks(run, observed, listed))
    actions = (*keep, *chosen.actions, *surplus, *ranks)
    since = events_since(observed, listed)
    if any(event.reason == "RunFailed" for event in chosen.events):
        # Nothing follows the last attempt, so it was not interrupted: the run's own event says the same.
        since = tuple(event for event in since if event.reason != "RunInterrupted")
    return replace(chosen, actions=actions, events=(*since, *chosen.events))


def needs_fresh_look(chosen: Plan, observed: Observed) -> bool:
    """Whether the plan needs facts read from the API server itself: those from watching may lag.

    An attempt is only created from fresh facts, except for a run that is entirely new, of which no child can be in
    transit. Reports of pods lag too, by minutes with thousands of pods: a pod is not stopped for a late start before it
    was asked again, as it may train by now.
    """
    makes = any(isinstance(action, CreateAttempt) for action in chosen.actions)
    is_late = chosen.state is not None and chosen.state.reason == STARTUP_DEADLINE
    stops = any(isinstance(action, DeletePod) for action in chosen.actions)
    return (makes and not (observed.is_new and not observed.stored.attempts)) or (is_late and stops)


def is_ours(run: RunFacts) -> bool:
    """Whether the run is neither paused by annotation nor managed by another controller."""
    return run.annotations.get(RECONCILE) != "disabled" and run.lifecycle.managed_by in (None, "", MANAGER)


def _choose(run: RunFacts, observed: Observed, now: float, limits: Limits, base: State) -> Plan:
    live = live_pods(observed, now, limits.node_lost_seconds)
    ended = find_end(run, observed, now, base)
    if ended is not None and (not live or observed.stored.finished_at is not None):
        return finish(run, observed, now, limits.ttl_seconds, ended)
    if ended is not None:
        return Plan(
            (*stop(live), *idle_jobs(observed)),
            replace(ended, outcome=None, phase="Stopping"),
            wake_at=node_wake(observed, limits.node_lost_seconds),
        )
    if run.lifecycle.suspend:
        return _suspend(observed, live, base, limits)
    current = base.attempts[-1] if base.attempts else None
    if current is not None and not current.is_over:
        return _watch(run, observed, now, limits, base)
    if live:
        message = f"waiting for pod {live[0].name} of an earlier attempt to end"
        return Plan(
            stop(live), replace(base, phase="Restarting", reason="PodTerminating", message=message, owner="none")
        )
    return _start(run, observed, now, base)


def _suspend(observed: Observed, live: Sequence[PodFacts], base: State, limits: Limits) -> Plan:
    """Deletes the pod, so that it checkpoints; if a Job has no pod yet, deletes the Job itself."""
    if live:
        state = replace(base, phase="Suspending", reason="Suspending", message="the pod checkpoints and ends")
        return Plan(stop(live), state, wake_at=node_wake(observed, limits.node_lost_seconds))
    current = base.attempts[-1] if base.attempts else None
    if current is not None and not current.is_over:
        return Plan(idle_jobs(observed), replace(base, phase="Suspending", reason="Suspending", message="the Job ends"))
    state = replace(
        base, phase="Suspended", reason="Suspended", message="suspended; set lifecycle.suspend to false to continue"
    )
    fresh = not observed.stored.holds("Suspended")
    return Plan((), state, (RunEvent("RunSuspended", "no pod is left; the last checkpoint stands"),) if fresh else ())


def _watch(run: RunFacts, observed: Observed, now: float, limits: Limits, base: State) -> Plan:
    """An attempt is live: checks whether it is well, and how long it may stay as it is."""
    attempt = base.attempts[-1]
    pods = [pod for pod in observed.pods if pod.attempt == attempt.number and not pod.is_terminal]
    stranded = [pod for pod in pods if is_stranded(pod, observed.nodes, now, limits.node_lost_seconds)]
    older = [pod for pod in observed.pods if pod.attempt < attempt.number and not pod.is_terminal]
    startup = startup_deadline(attempt, run.lifecycle)
    late = pods if startup is not None and now >= startup else []
    limit = run.lifecycle.active_deadline_seconds
    due = active_deadline(base.attempts, dict(base.retired), limit, now)
    pod = newest_pod(pods)
    state, actions = describe(run, observed, base, pod, now)
    if stranded:
        message = f"node {stranded[0].node} is not ready; the run continues elsewhere"
        state = replace(state, phase="Restarting", reason="NodeLost", message=message, owner="cluster")
    elif late:
        message = f"{state.reason}: {state.message}" if state.message else state.reason
        state = replace(state, phase="Restarting", reason=STARTUP_DEADLINE, message=message, owner=state.owner)
    wakes = [
        when
        for when in (
            startup if not late else None,
            due,
            waiting_deadline(base.attempts, observed.stored, run.lifecycle.waiting_deadline_seconds, now),
            node_wake(observed, limits.node_lost_seconds),
            None if pod is None or pod.outlived_since is None else pod.outlived_since + GRACE_AFTER_END,
            look_again(next((job for job in observed.jobs if job.attempt == attempt.number), None), pod, now),
        )
        if when is not None
    ]
    return Plan((*stop([*stranded, *late, *older]), *actions), state, wake_at=min(wakes, default=None))


def _start(run: RunFacts, observed: Observed, now: float, base: State) -> Plan:
    """No attempt is live and none of its pods is left: starts the next one as soon as that is allowed."""
    waiting = waiting_deadline(base.attempts, observed.stored, run.lifecycle.waiting_deadline_seconds, now)
    numbers = [*(attempt.number for attempt in base.attempts), *(job.attempt for job in observed.jobs),
               *(pod.attempt for pod in observed.pods), int(dict(base.retired).get("through", 0))]  # fmt: skip
    number = max(numbers, default=0) + 1
    if observed.former_pods:
        message = f"{observed.former_pods} pod(s) of a deleted run of the same name still end"
        return Plan((), replace(base, reason="FormerRunEnding", message=message), wake_at=now + FORMER_RUN_SECONDS)
    if run.nodes > 1 and observed.ranks_problem:
        state = replace(base, reason="RanksUnavailable", message=observed.ranks_problem, owner="cluster")
        return Plan((), state, wake_at=now + PATIENCE_SECONDS)
    following = decide_restart(base.attempts, base.spent, run.lifecycle, run.uid)
    if now < following.not_before:
        last = base.attempts[-1].verdict
        assert last is not None
        message = f"attempt {number} follows: {last.message or last.reason}"
        state = replace(
            base,
            phase="Restarting",
            reason=last.reason,
            message=message,
            owner=last.owner,
            next_at=following.not_before,
        )
        return Plan((), state, wake_at=following.not_before)
    if not are_placed(run, observed, number):
        made = any(each.attempt == number for each in observed.ranks)
        # The cluster of ranks is not watched, its pods are.
        soon = now + PATIENCE_SECONDS if len(observed.rank_pods) < run.nodes else None
        wake = min((each for each in (soon, waiting) if each is not None), default=None)
        actions = () if made else (CreateRanks(number),)
        return Plan(actions, describe_ranks(run, observed, base, number), wake_at=wake, waits_for_ranks=number)
    event = tell_created(number, base.attempts)
    state = replace(base, phase="Pending", reason=POD_PENDING[0], message=POD_PENDING[1])
    # There may be no news to wake us: a queue may hold the Job, or the Job may get no pod.
    wake = now if run.lifecycle.queue_name else now + PATIENCE_SECONDS
    return Plan((CreateAttempt(number, following.avoid_nodes),), state, (event,), wake, number)
