"""Budgets, back-off, deadlines, time to live, lost nodes and GPU time, in numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orbit_operator.facts import Attempt, Lifecycle, NodeFacts, PodFacts, Verdict
from orbit_operator.policies.accounting import GPUSeconds, account, account_all
from orbit_operator.policies.deadlines import active_deadline, active_seconds, startup_deadline
from orbit_operator.policies.restart import (
    FIRST_DELAY,
    JITTER,
    LONGEST_DELAY,
    back_off,
    charge,
    decide_restart,
    num_spent,
)
from orbit_operator.policies.suspend import is_lost, is_stranded
from orbit_operator.policies.ttl import expiry

NODE_LOST = Verdict("Failed", "NodeLost", "infra", "cluster", avoid_node=True)
GPU_FAULT = Verdict("Failed", "GPUFault", "infra", "hardware", avoid_node=True)
BAD_DATA = Verdict("Failed", "DataUnusable", "user", "user", "no prompts")
STOPPED = Verdict("Stopped", "Checkpointed", "free")


def history(*verdicts: Verdict, checkpoints: tuple[int, ...] = ()) -> list[Attempt]:
    steps: list[int | None] = [*checkpoints, *([None] * (len(verdicts) - len(checkpoints)))]
    return [
        Attempt(number, node=f"n{number}", ended=100.0 * number, checkpoint_step=step, verdict=verdict)
        for number, (verdict, step) in enumerate(zip(verdicts, steps, strict=True), start=1)
    ]


def restart(attempts: list[Attempt], **lifecycle: int) -> str:
    return decide_restart(attempts, num_spent(attempts, {}), Lifecycle(**lifecycle), "uid").refused  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("verdicts", "lifecycle", "refused"),
    [
        ((), {}, ""),
        ((BAD_DATA,), {}, "RetriesExhausted"),
        ((BAD_DATA,), {"max_user_retries": 1}, ""),
        ((BAD_DATA, BAD_DATA), {"max_user_retries": 1}, "RetriesExhausted"),
        ((NODE_LOST,) * 10, {}, ""),
        ((NODE_LOST,) * 11, {}, "InfraRestartsExhausted"),
        ((NODE_LOST,), {"max_infra_restarts": 0}, "InfraRestartsExhausted"),
        ((STOPPED,) * 9, {"max_infra_restarts": 0}, ""),
        ((NODE_LOST, STOPPED, NODE_LOST), {"max_infra_restarts": 2}, ""),
    ],
)
def test_two_budgets_and_what_is_free(verdicts: tuple[Verdict, ...], lifecycle: dict[str, int], refused: str) -> None:
    assert restart(history(*verdicts), **lifecycle) == refused


def test_attempts_that_are_no_longer_listed_still_count() -> None:
    spent = num_spent(history(NODE_LOST), {"infra": 9.0, "user": 1.0, "free": 3.0})
    assert (spent.infra, spent.user, spent.free) == (10, 1, 3)


def test_a_fault_of_the_machine_that_repeats_without_progress_is_the_programs() -> None:
    twice = history(GPU_FAULT, GPU_FAULT)
    assert charge(twice, 1, GPU_FAULT) == "infra"
    assert charge(twice, 2, GPU_FAULT) == "user"
    progressed = history(GPU_FAULT, GPU_FAULT, checkpoints=(5, 9))
    assert charge(progressed, 2, GPU_FAULT) == "infra"
    assert charge(history(NODE_LOST, GPU_FAULT), 2, GPU_FAULT) == "infra"
    assert charge(history(NODE_LOST, NODE_LOST), 2, NODE_LOST) == "infra"


def test_endings_on_request_are_free_but_not_for_ever() -> None:
    many = history(*[STOPPED] * 12)
    assert [charge(many, number, STOPPED) for number in (1, 7, 8, 12)] == ["free", "free", "infra", "infra"]
    progressing = history(*[STOPPED] * 12, checkpoints=tuple(range(1, 13)))
    assert charge(progressing, 12, STOPPED) == "free"


@pytest.mark.parametrize(("failures", "seconds"), [(1, 10), (2, 20), (3, 40), (7, 600), (50, 600)])
def test_the_back_off_doubles_up_to_a_bound(failures: int, seconds: float) -> None:
    delay = back_off(history(*[NODE_LOST] * failures), "uid")
    assert seconds * (1 - JITTER) <= delay <= seconds * (1 + JITTER)
    assert delay == back_off(history(*[NODE_LOST] * failures), "uid")
    assert delay != back_off(history(*[NODE_LOST] * failures), "another")
    assert FIRST_DELAY <= LONGEST_DELAY


def test_progress_starts_the_back_off_anew_and_a_request_needs_none() -> None:
    progressing = history(*[NODE_LOST] * 5, checkpoints=(1, 2, 3, 4, 5))
    assert back_off(progressing, "uid") <= 10 * (1 + JITTER)
    assert back_off(history(NODE_LOST, NODE_LOST, STOPPED), "uid") == 0.0


def test_the_next_attempt_avoids_the_nodes_that_failed() -> None:
    attempts = history(NODE_LOST, BAD_DATA, GPU_FAULT)
    following = decide_restart(attempts, num_spent(attempts, {}), Lifecycle(max_user_retries=5), "uid")
    assert following.avoid_nodes == ("n1", "n3")
    assert following.not_before > 300.0


def test_active_time_adds_up_over_attempts_and_stops_while_nothing_runs() -> None:
    first = Attempt(1, scheduled=0.0, ended=60.0, verdict=STOPPED)
    second = Attempt(2, scheduled=100.0)
    assert active_seconds([first, second], {"seconds": 5.0}, 130.0) == 95.0
    assert active_deadline([first, second], {}, 100, 130.0) == 140.0
    assert active_deadline([first], {}, 100, 130.0) is None
    assert active_deadline([first], {}, 60, 130.0) == 130.0
    assert active_deadline([first, second], {}, None, 130.0) is None


def test_the_start_up_deadline_counts_from_placement_and_spares_whom_nobody_can_ask() -> None:
    limit = Lifecycle(startup_deadline_seconds=40)
    assert startup_deadline(Attempt(1), limit) is None
    pulling = Attempt(1, scheduled=10.0)
    assert startup_deadline(pulling, limit) == 50.0
    mute = replace(pulling, started=20.0)
    assert startup_deadline(mute, limit) is None
    loading = replace(mute, answered=25.0)
    assert startup_deadline(loading, limit) == 50.0
    assert startup_deadline(replace(loading, running=30.0), limit) is None
    assert startup_deadline(loading, Lifecycle()) is None


@pytest.mark.parametrize(
    ("own", "default", "due"), [(None, -1, None), (None, 60, 160.0), (0, -1, 100.0), (30, 60, 130.0)]
)
def test_time_to_live(own: int | None, default: int, due: float | None) -> None:
    assert expiry(100.0, Lifecycle(ttl_seconds=own), default) == due
    assert expiry(None, Lifecycle(ttl_seconds=own), default) is None


def test_a_pod_is_lost_only_when_it_is_deleted_and_its_node_is_gone_for_long() -> None:
    pod = PodFacts("p", "u", 1, phase="Running", node="n0")
    leaving = replace(pod, deletion_due=30.0)
    gone, back, missing = (
        NodeFacts("n0", is_ready=False, not_ready_since=10.0),
        NodeFacts("n0"),
        NodeFacts("n0", exists=False),
    )
    assert is_lost(leaving, {"n0": gone}, 70.0, 60.0)
    assert not is_lost(leaving, {"n0": gone}, 69.0, 60.0)
    assert not is_lost(leaving, {"n0": back}, 999.0, 60.0)
    assert not is_lost(pod, {"n0": gone}, 999.0, 60.0)
    assert is_lost(leaving, {"n0": missing}, 0.0, 60.0)
    assert is_stranded(pod, {"n0": gone}, 70.0, 60.0)
    assert not is_stranded(leaving, {"n0": gone}, 70.0, 60.0)


def test_without_a_view_of_nodes_the_taint_managers_word_counts_after_the_grace_period() -> None:
    pod = PodFacts("p", "u", 1, phase="Running", node="n0", deletion_due=100.0)
    tainted = replace(pod, disruption="DeletionByTaintManager")
    assert not is_lost(tainted, {}, 120.0, 60.0)
    assert is_lost(tainted, {}, 131.0, 60.0)
    assert not is_lost(pod, {}, 999.0, 60.0)


def test_gpu_time_is_useful_lost_or_waiting() -> None:
    """8 GPUs: 60 s of loading, then 600 s of training, the last 30 s after the newest checkpoint."""
    attempt = Attempt(1, scheduled=0.0, running=60.0, checkpoint_at=630.0, checkpoint_step=9)
    assert account(attempt, 8, 660.0) == GPUSeconds(useful=4800, lost=0, waiting=480)
    crashed = replace(attempt, ended=660.0, verdict=GPU_FAULT)
    assert account(crashed, 8, 999.0) == GPUSeconds(useful=4560, lost=240, waiting=480)
    stopped = replace(attempt, ended=660.0, verdict=STOPPED)
    assert account(stopped, 8, 999.0) == GPUSeconds(useful=4800, lost=0, waiting=480)
    never = Attempt(2, scheduled=700.0, ended=710.0, verdict=NODE_LOST)
    assert account(never, 8, 999.0) == GPUSeconds(waiting=80)
    assert account(Attempt(3), 8, 999.0) == GPUSeconds()
    total = account_all([crashed, never], {"useful": 10.0, "lost": 1.0, "waiting": 2.0}, 8, 999.0)
    assert total == GPUSeconds(useful=4570, lost=241, waiting=562)
