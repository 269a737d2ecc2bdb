"""The history of a run, from its Jobs, its pods, and its status, which remembers those that are gone.

Belongs here: following an attempt until its final verdict. Does not belong here: what to do next (`plan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orbit_operator.actions import State
from orbit_operator.facts import Attempt, JobFacts, Lifecycle, Observed, PodFacts, Progress
from orbit_operator.policies.accounting import account_all
from orbit_operator.policies.deadlines import STARTING_PHASES, held_seconds, startup_deadline
from orbit_operator.policies.failure import judge_job, judge_lost, judge_ranks, judge_startup, read_termination
from orbit_operator.policies.restart import charge, num_spent
from orbit_operator.policies.suspend import GRACE_AFTER_END, is_lost
from orbit_operator.reported_values import read_count

ENDED_PHASES = ("Done", "Stopped", "Failed")
"""Phases that a process reports as it ends. They do not tell whether, or since when, it trained."""
LISTED = 9
"""Number of attempts, besides one being created, that are listed and keep their Jobs; older ones survive as sums."""


@dataclass(frozen=True, slots=True)
class _View:
    """The inputs, other than the attempt itself, for following one attempt."""

    observed: Observed
    now: float
    node_lost_seconds: float
    lifecycle: Lifecycle


def fold_attempts(
    observed: Observed, now: float, node_lost_seconds: float, lifecycle: Lifecycle
) -> tuple[Attempt, ...]:
    """Every attempt that is listed or has left a trace, ordered by number. Idempotent."""
    known = {attempt.number: attempt for attempt in observed.stored.attempts}
    numbers = {*known, *(job.attempt for job in observed.jobs), *(pod.attempt for pod in observed.pods)}
    retired = int(observed.stored.retired.get("through", 0))
    folded: list[Attempt] = []
    view = _View(observed, now, node_lost_seconds, lifecycle)
    for number in sorted(number for number in numbers if number > retired):
        attempt = known.get(number, Attempt(number))
        folded.append(attempt if attempt.is_over else _follow(attempt, folded, view))
    return tuple(folded)


def retire(
    attempts: Sequence[Attempt], retired: dict[str, float], gpus: int, now: float
) -> tuple[tuple[Attempt, ...], dict[str, float]]:
    """Keeps the newest attempts listed, and adds older ones that are over to the sums."""
    surplus = [attempt for attempt in attempts[: max(0, len(attempts) - LISTED)] if attempt.is_over]
    if not surplus:
        return tuple(attempts), retired
    spent, seconds = num_spent(surplus, retired), account_all(surplus, retired, gpus, now)
    sums = {
        "through": float(surplus[-1].number),
        "user": float(spent.user),
        "infra": float(spent.infra),
        "free": float(spent.free),
        "useful": seconds.useful,
        "lost": seconds.lost,
        "waiting": seconds.waiting,
        "seconds": retired.get("seconds", 0.0) + sum(held_seconds(attempt, now) for attempt in surplus),
    }
    return tuple(attempt for attempt in attempts if attempt.number > surplus[-1].number), sums


def add_created(state: State, job: JobFacts) -> State:
    """The state with an attempt whose Job was created in this pass."""
    attempt = Attempt(job.attempt, job_uid=job.uid, created=job.created)
    return replace(state, attempts=(*state.attempts, attempt))


def newest_pod(pods: Sequence[PodFacts]) -> PodFacts | None:
    """The pod that represents an attempt: the newest; of two equally old pods, the one still alive."""
    return max(pods, key=lambda pod: (pod.created, not pod.is_terminal, pod.uid), default=None)


def _follow(attempt: Attempt, before: Sequence[Attempt], view: _View) -> Attempt:
    job = next((job for job in view.observed.jobs if job.attempt == attempt.number), None)
    pods = [pod for pod in view.observed.pods if pod.attempt == attempt.number]
    pod = newest_pod(pods)
    if job is not None:
        attempt = replace(attempt, job_uid=job.uid, created=job.created)
    if pod is not None:
        attempt = _take_pod(attempt, pod, view.now)
        attempt = _take_progress(attempt, view.observed.progress)
    ended = _end(attempt, job, pods, view)
    if ended.verdict is None:
        return attempt
    taken = any(each.is_suspended and each.attempt == attempt.number for each in view.observed.ranks)
    verdict = judge_ranks(ended.verdict, view.observed.rank_pods, taken_back=taken)
    due = startup_deadline(ended, view.lifecycle)
    if due is not None and ended.ended is not None and ended.ended >= due:
        raw = view.observed.stored.raw
        verdict = judge_startup(verdict, str(raw.get("reason", "")), str(raw.get("message", "")))
    budget = charge([*before, ended], ended.number, verdict)
    return replace(ended, verdict=replace(verdict, budget=budget))


def _take_pod(attempt: Attempt, pod: PodFacts, now: float) -> Attempt:
    if attempt.pod_uid and attempt.pod_uid != pod.uid:
        end = attempt.ended if attempt.ended is not None else min(now, pod.created)
        seconds = held_seconds(replace(attempt, ended=end), now)
        attempt = replace(attempt, earlier_seconds=seconds, answered=None, running=None, ended=None)
    # A pod that the scheduler has not placed holds no GPU, however long it waits.
    ended = attempt.ended
    if ended is None and (pod.is_terminal or pod.outlived_since is not None):
        ended = pod.end.finished if pod.end is not None and pod.end.finished is not None else now
    return replace(
        attempt, job_uid=attempt.job_uid or pod.job_uid, pod_uid=pod.uid, pod=pod.name, node=pod.node,
        scheduled=pod.scheduled if pod.node else None, started=pod.started, ended=ended,
    )  # fmt: skip


def _take_progress(attempt: Attempt, progress: Progress | None) -> Attempt:
    if progress is None or progress.pod_uid != attempt.pod_uid:
        return attempt
    running = attempt.running
    answered = attempt.answered if attempt.answered is not None else progress.at
    if running is None and progress.phase not in (*STARTING_PHASES, *ENDED_PHASES):
        running = progress.at
    attempt = replace(attempt, answered=answered, running=running, step=max(attempt.step, progress.step))
    if progress.checkpoint_step is not None and progress.checkpoint_step > (attempt.checkpoint_step or 0):
        attempt = replace(attempt, checkpoint_step=progress.checkpoint_step, checkpoint_at=progress.at)
    return attempt


def _take_last_words(attempt: Attempt, pod: PodFacts) -> Attempt:
    """Takes the final progress of a pod that ended between two polls from its termination message."""
    said = read_termination(pod.end.message) if pod.end is not None else {}
    step, checkpoint = read_count(said, "step"), read_count(said, "last_checkpoint_step")
    if step is not None:
        attempt = replace(attempt, step=max(attempt.step, step))
    if checkpoint is not None and checkpoint > (attempt.checkpoint_step or 0):
        attempt = replace(attempt, checkpoint_step=checkpoint, checkpoint_at=attempt.ended)
    return attempt


def _end(attempt: Attempt, job: JobFacts | None, pods: Sequence[PodFacts], view: _View) -> Attempt:
    """The attempt, with its verdict if it is over: its Job ended or is gone, and none of its pods can still write."""
    nodes = view.observed.nodes
    pod = newest_pod(pods)
    since = None if pod is None else pod.outlived_since
    outlived = since is not None and view.now >= since + GRACE_AFTER_END
    unended = [each for each in pods if not each.is_terminal and not (outlived and each is pod)]
    lost = [pod for pod in unended if is_lost(pod, nodes, view.now, view.node_lost_seconds)]
    if len(lost) < len(unended):
        return attempt
    if lost:
        verdict = judge_lost(lost[-1])
    elif job is None or job.finished is not None or outlived:
        verdict = judge_job(job, pod, nodes.get(pod.node) if pod is not None else None)
    else:
        return attempt
    if outlived and pod is not None:
        beside = f"its pod is ended although {' and '.join(pod.still_running) or 'another container'} still runs"
        verdict = replace(verdict, message="; ".join(filter(None, (verdict.message, beside))))
    if pod is not None:
        attempt = _take_last_words(attempt, pod)
    ended = attempt.ended if attempt.ended is not None else (job.finished_at if job is not None else None)
    return replace(attempt, ended=view.now if ended is None else ended, verdict=verdict)
