"""What follows from what is seen: the order of the questions, case by case."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from unit_operator.cluster_model import UNKNOWN_PLAN, Cluster, build_cluster, work

from orbit_operator.actions import (
    ApplySupport,
    CreateAttempt,
    DeleteJob,
    DeletePod,
    DeleteRun,
    Plan,
    RunEvent,
    SetFinalizer,
    StartCleanup,
)
from orbit_operator.ending import CLEANUP_SECONDS, FINALIZER
from orbit_operator.facts import ContainerEnd, NodeFacts, Observed, PodFacts, Progress, QueueFacts
from orbit_operator.plan import Limits, plan
from orbit_operator.policies.restart import FREE_WITHOUT_PROGRESS


def running(**lifecycle: Any) -> Cluster:
    """A run whose first pod runs on n0."""
    cluster = build_cluster(**lifecycle)
    work(cluster)
    cluster.run_pod()
    work(cluster, Progress(cluster.now, "pod-2", "Running", 1, checkpoint_step=1))
    return cluster


def condition(cluster: Cluster, kind: str) -> tuple[str, str]:
    (found,) = [each for each in cluster.status["conditions"] if each["type"] == kind]
    return found["status"], found["reason"]


def test_a_new_run_gets_its_first_attempt_in_the_first_pass() -> None:
    chosen = work(build_cluster())
    assert chosen.actions == (CreateAttempt(1),)
    assert [event.reason for event in chosen.events] == ["RunAttemptCreated"]


def test_what_follows_a_first_attempt_is_looked_at_though_nobody_tells_of_it() -> None:
    """A Job that a queue holds back, or one that is given no pod, changes in nothing that is watched."""
    plain, queued = build_cluster(), build_cluster(queue_name="team-queue")
    assert work(plain).wake_at == plain.now + 10
    assert work(queued).wake_at == queued.now


def test_an_attempt_whose_maker_died_is_told_by_its_successor() -> None:
    cluster = build_cluster()
    cluster.carry_out(CreateAttempt(1))
    chosen = work(cluster)
    assert chosen.actions == ()
    assert [(event.reason, event.message) for event in chosen.events] == [("RunAttemptCreated", "attempt 1")]
    assert work(cluster).events == ()


@pytest.mark.parametrize(
    ("resumed_from", "told"),
    [
        (20, [("RunResumedFromCheckpoint", "attempt 2 continues after step 20")]),
        (0, [("RunStartedAnew", "attempt 2 begins at step 0: it found no checkpoint")]),
        (None, []),
    ],
)
def test_where_a_later_attempt_begins_is_told_in_its_own_words(
    resumed_from: int | None, told: list[tuple[str, str]]
) -> None:
    """It may be a later checkpoint than the last one that was heard of; an older runtime says nothing of it."""
    cluster = running(max_infra_restarts=3)
    cluster.exit(82)
    cluster.conclude_jobs()
    (created,) = [event for event in work(cluster).events if event.reason == "RunInterrupted"]
    assert "EngineDied" in created.message
    cluster.wait(600)
    assert "attempt 2 after EngineDied; the last checkpoint seen is of step 1" in [
        event.message for event in work(cluster).events
    ]
    cluster.run_pod("n1")
    pod = next(uid for uid, each in cluster.pods.items() if each.attempt == 2)
    begun = Progress(cluster.now, pod, "Running", 21, resumed_from=resumed_from)
    events = [(event.reason, event.message) for event in work(cluster, begun).events]
    assert events == told
    assert work(cluster, begun).events == ()


def test_a_running_run_needs_nothing() -> None:
    cluster = running()
    chosen = work(cluster)
    assert (chosen.actions, chosen.events) == ((), ())
    assert (cluster.status["phase"], cluster.status["whoActs"]) == ("Running", "None")
    assert condition(cluster, "Progressing") == ("True", "Running")
    assert condition(cluster, "Succeeded")[0] == "Unknown"


def test_a_success_is_final_whatever_happens_to_its_jobs() -> None:
    cluster = running()
    cluster.exit(0)
    cluster.conclude_jobs()
    assert [event.reason for event in work(cluster).events] == ["RunSucceeded"]
    cluster.jobs.clear()
    cluster.pods.clear()
    again = work(cluster)
    assert (again.actions, again.events) == ((), ())
    assert (cluster.status["phase"], condition(cluster, "Complete")) == ("Succeeded", ("True", "Succeeded"))


def test_a_success_says_why_it_came_before_the_last_step() -> None:
    cluster = running()
    cluster.exit(0, message=json.dumps({"run": "adder", "step": 20, "message": "held-out was 0.9 at step 20"}))
    cluster.conclude_jobs()
    (event,) = work(cluster).events
    assert event.message == "the run is complete: held-out was 0.9 at step 20"
    assert {each["message"] for each in cluster.status["conditions"] if each["type"] == "Complete"} == {event.message}


def test_a_run_whose_pod_has_ended_does_not_wait_for_a_pod() -> None:
    cluster = running()
    cluster.exit(0)
    work(cluster)
    assert (cluster.status["phase"], cluster.status["reason"]) == ("Stopping", "PodTerminating")


def test_a_run_that_ends_between_two_questions_is_known_to_its_last_step() -> None:
    cluster = running()
    cluster.exit(0)
    cluster.conclude_jobs()
    best: dict[str, Any] = {"best_step": 4, "best_evaluation": "held-out", "best_value": 0.75}
    work(cluster, Progress(cluster.now, "pod-2", "Done", 6, reward=0.5, checkpoint_step=6, **best))
    assert (cluster.status["step"], cluster.status["reward"], cluster.status["checkpoint"]["step"]) == (6, 0.5, 6)
    assert cluster.status["best"] == {"step": 4, "evaluation": "held-out", "value": 0.75}
    assert cluster.status["attempts"][0]["step"] == 6


def test_a_new_attempt_that_has_not_read_its_checkpoint_takes_no_step_back() -> None:
    cluster = running()
    work(cluster, Progress(cluster.now, "pod-2", "Running", 6))
    work(cluster, Progress(cluster.now, "pod-2", "Starting", 0))
    assert cluster.status["step"] == 6


def test_a_pod_that_fails_as_it_starts_has_never_trained() -> None:
    cluster = build_cluster()
    work(cluster)
    cluster.run_pod()
    cluster.exit(77)
    cluster.conclude_jobs()
    work(cluster, Progress(cluster.now, "pod-2", "Failed", 0))
    assert "runTime" not in cluster.status["attempts"][0]


def test_a_users_mistake_ends_the_run_and_says_whose_it_is() -> None:
    cluster = running()
    cluster.exit(77)
    cluster.conclude_jobs()
    work(cluster)
    assert (cluster.status["phase"], cluster.status["reason"], cluster.status["whoActs"]) == (
        "Failed",
        "CredentialsInvalid",
        "User",
    )
    assert condition(cluster, "Failed") == ("True", "CredentialsInvalid")


def test_a_lost_node_is_waited_for_and_then_left() -> None:
    cluster = running()
    cluster.lose_node("n0")
    assert work(cluster).wake_at == cluster.now + 60.0
    cluster.wait(60.0)
    chosen = work(cluster)
    assert chosen.actions == (DeletePod("pod-2", "pod-2"),)
    assert cluster.status["reason"] == "NodeLost"
    after = work(cluster)
    assert after.wake_at is not None
    assert cluster.status["attempts"][0]["ending"]["reason"] == "NodeLost"
    cluster.wait(after.wake_at - cluster.now)
    assert work(cluster).actions == (CreateAttempt(2, ("n0",)),)


def test_a_pod_that_is_stuck_ending_on_a_healthy_node_is_waited_for() -> None:
    cluster = running()
    cluster.delete_pod("pod-2")
    cluster.wait(100_000.0)
    assert work(cluster).actions == ()
    assert cluster.status["reason"] == "PodTerminating"


def test_suspension_deletes_the_pod_and_resuming_starts_the_next_attempt() -> None:
    cluster = running()
    cluster.suspend(True)
    assert work(cluster).actions == (DeletePod("pod-2", "pod-2"),)
    assert cluster.status["phase"] == "Suspending"
    cluster.end_deleted(75)
    cluster.conclude_jobs()
    assert "RunSuspended" in [event.reason for event in work(cluster).events]
    assert condition(cluster, "Suspended") == ("True", "Suspended")
    assert work(cluster).events == ()
    cluster.suspend(False)
    assert work(cluster).actions == (CreateAttempt(2),)
    assert condition(cluster, "Suspended") == ("False", "Resumed")
    assert (cluster.status["freeRestarts"], cluster.status["infraRestarts"]) == (1, 0)


def test_a_run_that_is_created_suspended_makes_nothing() -> None:
    cluster = build_cluster(suspend=True)
    assert work(cluster).actions == ()
    assert cluster.status["phase"] == "Suspended"


def test_a_held_job_is_withdrawn_when_the_run_is_suspended() -> None:
    cluster = build_cluster(queue_name="team-queue")
    work(cluster)
    work(cluster)
    assert (cluster.status["phase"], cluster.status["reason"]) == ("Queued", "QueuedByKueue")
    cluster.suspend(True)
    assert work(cluster).actions == (DeleteJob("adder-a1", "job-1"),)
    work(cluster)
    assert cluster.status["phase"] == "Suspended"
    assert cluster.status["attempts"][0]["ending"]["budget"] == "Free"


def test_what_the_queue_says_stands_in_the_condition() -> None:
    cluster = build_cluster(queue_name="team-queue")
    work(cluster)
    observed = replace(cluster.observe(), queue=QueueFacts("QuotaExceeded", "8 GPUs are more than the queue has left"))
    cluster.write_status(observed, cluster.think(observed))
    assert condition(cluster, "Admitted") == ("False", "QuotaExceeded")
    assert "8 GPUs" in cluster.status["message"]


def test_a_configuration_that_is_missing_is_made_again() -> None:
    cluster = running()
    cluster.pods["pod-2"] = replace(
        cluster.pods["pod-2"], started=None, phase="Pending", waiting_reason="CreateContainerConfigError"
    )
    cluster.status = {}
    assert work(cluster).actions == (ApplySupport(),)
    assert (cluster.status["reason"], cluster.status["whoActs"]) == ("ConfigurationMissing", "User")


def test_a_start_that_takes_too_long_is_ended_and_tried_elsewhere() -> None:
    cluster = build_cluster(startup_deadline_seconds=40)
    work(cluster)
    cluster.make_pod()
    cluster.schedule("n0")
    began = cluster.now
    assert work(cluster).wake_at == began + 10.0  # What keeps the container is asked for.
    cluster.wait(30.0)
    assert work(cluster).wake_at == began + 40.0
    cluster.wait(10.0)
    assert work(cluster).actions == (DeletePod("pod-2", "pod-2"),)
    cluster.end_deleted(143)
    cluster.conclude_jobs()
    work(cluster)
    assert cluster.status["attempts"][0]["ending"]["reason"] == "StartupDeadlineExceeded"


def test_the_active_deadline_ends_the_run_over_all_attempts() -> None:
    cluster = running(active_deadline_seconds=100)
    cluster.wait(100.0)
    chosen = work(cluster)
    assert chosen.actions == (DeletePod("pod-2", "pod-2"),)
    assert cluster.status["phase"] == "Stopping"
    cluster.end_deleted(75)
    cluster.conclude_jobs()
    work(cluster)
    assert (cluster.status["phase"], cluster.status["reason"]) == ("Failed", "DeadlineExceeded")


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_run_that_waits_for_a_place_beyond_its_limit_ends_with_what_it_waited_for(nodes: int) -> None:
    cluster = build_cluster(nodes=nodes, waiting_deadline_seconds=3600, max_infra_restarts=3)
    work(cluster)
    pods, owner = (cluster.pods, "job-1") if nodes == 1 else (cluster.rank_pods, "ranks-1")
    pods["p"] = PodFacts("p", "p", 1, owner, unschedulable="no node fits")
    assert work(cluster).wake_at is not None
    cluster.wait(3599.0)
    work(cluster)
    assert cluster.status["reason"] == "Unschedulable"
    cluster.wait(1.0)
    for _ in range(3):
        work(cluster)
        cluster.end_deleted(143)
        cluster.conclude_jobs()
        cluster.wait(60.0)
    assert (cluster.status["phase"], cluster.status["reason"]) == ("Failed", "WaitingDeadlineExceeded")
    assert cluster.status["message"].startswith("no node within 3600 s: Unschedulable: ")
    assert cluster.status["message"].count("Unschedulable") == 1
    assert (cluster.status["whoActs"], cluster.ranks) == ("Cluster", {})


def test_the_limit_on_waiting_spares_a_run_that_has_its_place_and_counts_anew_for_each_attempt() -> None:
    cluster = running(waiting_deadline_seconds=100, max_infra_restarts=3)
    cluster.wait(10_000.0)
    work(cluster)
    assert cluster.status["phase"] == "Running"
    cluster.exit(74)
    cluster.conclude_jobs()
    work(cluster)
    cluster.wait(1000.0)
    work(cluster)
    cluster.wait(99.0)
    work(cluster)
    assert (cluster.status["phase"], cluster.status["attempt"]) == ("Pending", 2)
    cluster.wait(1.0)
    work(cluster)
    work(cluster)
    assert cluster.status["reason"] == "WaitingDeadlineExceeded"


def test_a_run_that_is_over_goes_away_after_its_time_to_live_and_keeps_its_artifacts() -> None:
    cluster = running(ttl_seconds=60)
    cluster.run = replace(cluster.run, deletes_artifacts=True, finalizers=(FINALIZER,))
    cluster.exit(0)
    cluster.conclude_jobs()
    assert work(cluster).wake_at == cluster.now + 60.0
    cluster.wait(60.0)
    assert work(cluster).actions == (SetFinalizer(False), DeleteRun())


def test_what_this_operator_cannot_read_never_starts_and_never_ends_what_runs() -> None:
    cluster = build_cluster()
    cluster.run = replace(cluster.run, invalid="spec.future: unknown field")
    assert work(cluster).actions == ()
    assert (cluster.status["phase"], cluster.status["reason"]) == ("Failed", "ValidationFailed")
    live = running()
    live.run = replace(live.run, invalid="spec.future: unknown field")
    assert work(live).actions == ()
    assert live.status["phase"] == "Running"


def test_a_plan_that_does_not_fit_makes_no_pod() -> None:
    cluster = build_cluster()
    refused = ("False", "AdapterTooLarge", "rank 512 does not fit")
    chosen = plan(cluster.run, cluster.observe(), cluster.now, cluster.limits, refused)
    assert chosen.actions == ()
    assert chosen.state is not None
    assert (chosen.state.reason, chosen.state.owner, chosen.state.outcome) == ("AdapterTooLarge", "user", False)


@pytest.mark.parametrize(
    ("annotations", "managed_by", "ours"),
    [
        ({}, None, True),
        ({}, "orbitrl.dev/orbit-operator", True),
        ({}, "kueue.x-k8s.io/multikueue", False),
        ({"orbitrl.dev/reconcile": "disabled"}, None, False),
    ],
)
def test_a_run_of_another_controller_is_left_alone(
    annotations: dict[str, str], managed_by: str | None, ours: bool
) -> None:
    cluster = build_cluster(managed_by=managed_by)
    cluster.run = replace(cluster.run, annotations=annotations)
    assert (cluster.think(cluster.observe()) != Plan()) is ours


def test_pods_of_a_deleted_run_of_the_same_name_go_first() -> None:
    cluster = build_cluster()
    chosen = cluster.think(replace(cluster.observe(), former_pods=1))
    assert chosen.actions == ()
    assert chosen.wake_at is not None


def test_deletion_cleans_up_once_nothing_writes_any_more_and_never_for_long() -> None:
    cluster = running()
    cluster.run = replace(cluster.run, deletes_artifacts=True, finalizers=(FINALIZER,), deleting_since=cluster.now)
    assert work(cluster).actions == (DeletePod("pod-2", "pod-2"),)
    cluster.end_deleted(75)
    assert work(cluster).actions == (StartCleanup(),)
    assert work(cluster).actions == ()
    cluster.cleanup = "Complete"
    assert work(cluster).actions == (SetFinalizer(False),)
    cluster.cleanup = "Running"
    cluster.wait(CLEANUP_SECONDS)
    assert cluster.think(cluster.observe()) == Plan()  # the finalizer is gone already
    cluster.run = replace(cluster.run, finalizers=(FINALIZER,))
    timed_out = cluster.think(cluster.observe())
    assert timed_out.actions == (SetFinalizer(False),)
    assert [event.reason for event in timed_out.events] == ["ArtifactCleanupTimedOut"]


def test_a_cleanup_that_failed_holds_nobody_up_and_says_what_stays_where_and_why() -> None:
    cluster = running()
    cluster.end_deleted(75)
    cluster.run = replace(cluster.run, deletes_artifacts=True, finalizers=(FINALIZER,), deleting_since=cluster.now,
                          artifacts="s3://runs/adder")  # fmt: skip
    cluster.pods.clear()
    assert work(cluster).actions == (StartCleanup(),)
    cluster.cleanup = "Failed"
    why = "error: 403 Forbidden (where: s3://runs)"
    failed = cluster.think(replace(cluster.observe(), cleanup_failure=why))
    assert failed.actions == (SetFinalizer(False),)
    assert failed.events == (
        RunEvent(
            "ArtifactCleanupFailed",
            f"what was not deleted stays in s3://runs/adder, and there are no more tries: {why}",
            True,
        ),
    )
    assert work(cluster).actions == (SetFinalizer(False),), "without a reason too"
    assert work(cluster) == Plan()


def test_deletion_without_a_policy_is_the_collectors_business() -> None:
    cluster = running()
    cluster.run = replace(cluster.run, deleting_since=cluster.now)
    assert work(cluster) == Plan()


def test_old_attempts_leave_the_list_and_their_jobs_go() -> None:
    cluster = build_cluster(max_infra_restarts=100)
    for _ in range(80):
        work(cluster)
        cluster.run_pod("n1")
        cluster.exit(82)
        cluster.conclude_jobs()
        cluster.wait(700.0)
    assert len(cluster.status["attempts"]) <= 10
    over = [attempt["number"] for attempt in cluster.status["attempts"] if "ending" in attempt]
    assert cluster.status["infraRestarts"] == over[-1] > 20
    assert cluster.status["retired"]["through"] == cluster.status["attempts"][0]["number"] - 1
    assert len(cluster.jobs) <= 10


def test_a_pod_that_ends_as_if_it_were_asked_to_cannot_go_on_for_ever() -> None:
    """Also with more attempts than the status lists."""
    cluster = build_cluster(max_infra_restarts=3)
    for _ in range(60):
        work(cluster)
        if cluster.status["phase"] == "Failed":
            break
        cluster.run_pod("n1")
        cluster.exit(75)
        cluster.conclude_jobs()
        cluster.wait(700.0)
    assert cluster.status["reason"] == "InfraRestartsExhausted"
    assert (cluster.status["freeRestarts"], cluster.status["infraRestarts"]) == (FREE_WITHOUT_PROGRESS, 4)


def test_a_status_that_was_lost_is_found_again_in_the_jobs() -> None:
    cluster = running()
    cluster.exit(0)
    cluster.conclude_jobs()
    work(cluster)
    cluster.status = {}
    work(cluster)
    assert cluster.status["phase"] == "Succeeded"


def test_a_broken_gpu_on_the_node_shows_in_the_condition() -> None:
    cluster = running()
    cluster.nodes["n0"] = NodeFacts("n0", problems=("XID 79",))
    work(cluster)
    assert condition(cluster, "GPUHealthy") == ("False", "GPUFault")


def test_limits_have_the_documented_defaults() -> None:
    assert Limits() == Limits(node_lost_seconds=300.0, ttl_seconds=-1)
    assert Observed().stored.attempts == ()
    assert UNKNOWN_PLAN[0] == "Unknown"


@pytest.mark.parametrize(("code", "ends"), [(0, "Succeeded"), (79, "Pending")])
def test_a_container_that_the_cluster_adds_keeps_no_ended_run_running(code: int, ends: str) -> None:
    cluster = running()
    (uid,) = cluster.pods
    end = ContainerEnd(code, "Completed" if code == 0 else "Error", finished=cluster.now)
    cluster.pods[uid] = replace(cluster.pods[uid], end=end, still_running=("istio-proxy",))
    chosen = work(cluster)
    assert (cluster.status["phase"], chosen.actions, chosen.wake_at) == ("Stopping", (), cluster.now + 30)
    assert "istio-proxy still runs" in cluster.status["message"]
    useful = cluster.status["gpuSeconds"]
    cluster.wait(31)
    assert work(cluster).actions == (DeletePod(uid, uid),)
    ending = cluster.status["attempts"][0]["ending"]
    assert (ending["exitCode"], cluster.status["gpuSeconds"]) == (code, useful)
    assert "istio-proxy still runs" in ending["message"]
    cluster.end_deleted(143)
    cluster.conclude_jobs()
    work(cluster)
    assert cluster.status["phase"] == ends


def test_a_job_that_a_queue_took_by_itself_waits_for_the_queue() -> None:
    cluster = build_cluster()
    work(cluster)
    (name,) = cluster.jobs
    cluster.jobs[name] = replace(cluster.jobs[name], is_suspended=True)
    observed = replace(cluster.observe(), queue=QueueFacts("Pending", "8 more needed"))
    cluster.write_status(observed, cluster.think(observed))
    assert (cluster.status["reason"], cluster.status["whoActs"]) == ("QueuedByKueue", "Cluster")
    assert (cluster.status["message"], condition(cluster, "Admitted")) == ("8 more needed", ("False", "Pending"))


def test_a_pod_behind_gates_says_which() -> None:
    cluster = build_cluster()
    work(cluster)
    cluster.make_pod()
    (uid,) = cluster.pods
    cluster.pods[uid] = replace(cluster.pods[uid], gates=("kueue.x-k8s.io/topology",))
    work(cluster)
    assert (cluster.status["phase"], cluster.status["reason"]) == ("Queued", "SchedulingGated")
    assert "kueue.x-k8s.io/topology" in cluster.status["message"]


def test_a_run_that_failed_for_good_was_not_interrupted() -> None:
    cluster = running()
    cluster.exit(64)
    cluster.conclude_jobs()
    assert [event.reason for event in work(cluster).events] == ["RunFailed"]
