"""API objects as the API server writes them, and the facts that they become."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from orbit_operator.facts import Attempt, ContainerEnd, JobFacts, PodFacts, Progress, RecordedStatus
from orbit_operator.observe import judge_manifest, newest_word, why_failed
from orbit_operator.read import lifecycle_of, pack_run, read_job, read_node, read_pod
from orbit_operator.timestamps import format_micro_time, format_time, read_time

LABELS = {"orbitrl.dev/attempt": "3", "orbitrl.dev/run-name": "adder", "orbitrl.dev/run-uid": "r"}
HEAD = {
    "name": "adder-a3-x",
    "namespace": "team",
    "uid": "u",
    "labels": LABELS,
    "creationTimestamp": "2026-01-01T00:00:00Z",
}
CREATED = 1767225600.0


def pod(status: dict[str, Any], **head: Any) -> dict[str, Any]:
    owner = {"kind": "Job", "uid": "j"}
    return {"metadata": {**HEAD, "ownerReferences": [owner], **head}, "spec": {"nodeName": "n0"}, "status": status}


def test_times_are_read_as_they_are_written() -> None:
    assert read_time("2026-01-01T00:00:00Z") == CREATED
    assert format_time(CREATED + 0.9) == "2026-01-01T00:00:00Z"
    assert read_time(format_micro_time(CREATED + 0.25)) == CREATED + 0.25
    assert (read_time(None), read_time("soon"), read_time(3)) == (None, None, None)


def test_a_running_pod() -> None:
    state = {"running": {"startedAt": "2026-01-01T00:00:09Z"}}
    facts = read_pod(
        pod(
            {
                "phase": "Running",
                "podIP": "10.0.0.1",
                "conditions": [
                    {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:02Z"},
                    {"type": "Ready", "status": "True"},
                ],
                "containerStatuses": [{"name": "sidecar", "state": {}}, {"name": "run", "state": state}],
            }
        )
    )
    assert (facts.attempt, facts.job_uid, facts.node, facts.ip, facts.is_ready) == (3, "j", "n0", "10.0.0.1", True)
    assert (facts.created, facts.scheduled, facts.started) == (CREATED, CREATED + 2, CREATED + 9)
    assert (facts.end, facts.waiting_reason, facts.is_terminal) == (None, "", False)


def test_a_pod_that_ended_in_memory_pressure() -> None:
    ended = {"exitCode": 137, "reason": "OOMKilled", "message": "m", "finishedAt": "2026-01-01T00:01:00Z",
             "startedAt": "2026-01-01T00:00:09Z"}  # fmt: skip
    facts = read_pod(pod({"phase": "Failed", "containerStatuses": [{"name": "run", "state": {"terminated": ended}}]}))
    assert facts.end == ContainerEnd(137, "OOMKilled", "m", CREATED + 60)
    assert facts.started == CREATED + 9


def test_an_engine_that_was_killed_for_its_memory_is_known_when_it_runs_again() -> None:
    killed, ended = {"terminated": {"reason": "OOMKilled"}}, {"terminated": {"reason": "Error"}}
    for name, state, last, seen in (
        ("engine", {"running": {}}, killed, True),
        ("engine", killed, {}, True),
        ("engine", {"running": {}}, ended, False),
        ("run", killed, {}, False),
    ):
        engine = {"name": name, "state": state, "lastState": last}
        assert read_pod(pod({"initContainerStatuses": [engine]})).engine_killed is seen


def test_a_pod_that_waits_says_for_what() -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    facts = read_pod(pod({"phase": "Pending", "containerStatuses": [{"name": "run", "state": waiting}]}))
    assert (facts.waiting_reason, facts.waiting_message) == ("ImagePullBackOff", "no such image")
    creating = {"waiting": {"reason": "ContainerCreating"}}
    assert read_pod(pod({"containerStatuses": [{"name": "run", "state": creating}]})).waiting_reason == ""
    engine = {"waiting": {"reason": "CrashLoopBackOff"}}
    split = {"initContainerStatuses": [{"name": "engine", "state": engine}], "containerStatuses": []}
    assert read_pod(pod(split)).waiting_reason == "CrashLoopBackOff"


def test_a_pod_without_a_place() -> None:
    unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    facts = read_pod(pod({"phase": "Pending", "conditions": [unplaced]}))
    assert (facts.unschedulable, facts.scheduled) == ("0/3 nodes", None)
    gated = pod({"conditions": [{**unplaced, "reason": "SchedulingGated"}]})
    gated["spec"] = {"schedulingGates": [{"name": "kueue.x-k8s.io/topology"}]}
    assert (read_pod(gated).unschedulable, read_pod(gated).gates) == ("", ("kueue.x-k8s.io/topology",))


def test_a_container_that_a_webhook_added_is_named_when_it_fails_and_while_it_runs() -> None:
    failed = {"terminated": {"exitCode": 1, "reason": "Error", "message": "permission denied"}}
    waits = {"waiting": {"reason": "PodInitializing"}}
    facts = read_pod(
        pod(
            {
                "phase": "Failed",
                "initContainerStatuses": [{"name": "vault-agent-init", "state": failed}],
                "containerStatuses": [{"name": "run", "state": waits}, {"name": "proxy", "state": {"running": {}}}],
            }
        )
    )
    assert facts.side_failure == "container vault-agent-init ended with exit code 1: permission denied"
    assert (facts.end, facts.started, facts.still_running) == (None, None, ("proxy",))


def test_a_pod_that_is_being_deleted_because_of_a_taint() -> None:
    target = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": "node lost"}
    facts = read_pod(pod({"phase": "Running", "conditions": [target]}, deletionTimestamp="2026-01-01T00:05:00Z"))
    assert (facts.disruption, facts.deletion_due, facts.is_deleting) == ("DeletionByTaintManager", CREATED + 300, True)


@pytest.mark.parametrize(
    ("conditions", "finished", "exit_code"),
    [
        ([], None, None),
        ([{"type": "Complete", "status": "True"}], "Complete", None),
        ([{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "m"}], "Failed", None),
        ([{"type": "FailureTarget", "status": "True", "reason": "PodFailurePolicy"}], None, None),
        (
            [
                {
                    "type": "Failed",
                    "status": "True",
                    "reason": "PodFailurePolicy",
                    "message": "Container run for pod team/adder-a3-x failed with exit code 75 matching FailJob rule",
                }
            ],
            "Failed",
            75,
        ),
    ],
)
def test_a_job(conditions: list[dict[str, str]], finished: str | None, exit_code: int | None) -> None:
    facts = read_job({"metadata": HEAD, "spec": {"suspend": True}, "status": {"conditions": conditions, "active": 1}})
    assert (facts.attempt, facts.finished, facts.exit_code) == (3, finished, exit_code)
    assert (facts.is_suspended, facts.is_deleting, facts.had_pod) == (True, False, True)


def test_a_child_without_a_number_is_no_attempt() -> None:
    assert read_job({"metadata": {**HEAD, "labels": {}}}).attempt == 0
    assert read_job({"metadata": {**HEAD, "labels": {"orbitrl.dev/attempt": "x"}}}).attempt == 0


def test_a_node_that_is_gone_and_one_with_a_broken_gpu() -> None:
    def node(**conditions: str) -> dict[str, Any]:
        listed = [
            {"type": kind, "status": status, "reason": f"{kind}Reason", "lastTransitionTime": "2026-01-01T00:00:00Z"}
            for kind, status in conditions.items()
        ]
        return {"metadata": {"name": "n0"}, "status": {"conditions": listed}}

    gone = read_node(node(Ready="Unknown"))
    assert (gone.is_ready, gone.not_ready_since) == (False, CREATED)
    broken = read_node(node(Ready="True", GPUXidError="True", MemoryPressure="True", GPUHealthy="True"))
    assert (broken.is_ready, broken.problems) == (True, ("GPUXidError: GPUXidErrorReason",))


def test_a_run_is_kept_in_few_bytes_and_comes_back() -> None:
    head = {**HEAD, "name": "adder", "resourceVersion": "7", "managedFields": [{"manager": "kubectl" * 1000}]}
    raw = pack_run({"metadata": head, "spec": {"a": 1}, "apiVersion": "x"})
    assert (raw.uid, raw.version) == ("u", "7")
    assert len(raw.body) < 600
    assert orjson.loads(raw.body)["spec"] == {"a": 1}


def test_a_lifecycle_of_another_version_is_read_as_far_as_it_is_known() -> None:
    read = lifecycle_of({"lifecycle": {"suspend": True, "fromTheFuture": 1}})
    assert (read.suspend, read.max_infra_restarts, read.max_user_retries) == (True, 10, 0)
    assert lifecycle_of({}).suspend is False


def test_a_manifest_that_does_not_fit_a_config_map_is_told_before_it_is_tried() -> None:
    def problem(size: int) -> str:
        rewards = [{"name": "r", "type": "Math", "arguments": {"prompts": "ü" * size}}]
        spec = {
            "model": {"uri": "a"}, "data": {"prompts": [{"uri": "a"}]}, "training": {"steps": 5},
            "environment": {"rewards": rewards},
        }  # fmt: skip
        return judge_manifest({"metadata": {"name": "adder", "namespace": "team", "uid": "u"}, "spec": spec}).invalid

    assert problem(500_000) == ""
    assert "the manifest takes 1200" in problem(600_000)
    assert "name their URI" in problem(600_000)
    assert problem(600_000).isprintable()


def test_a_pods_last_words_go_before_what_was_heard_of_it() -> None:
    heard = Progress(10.0, "p1", "Running", 3)
    line = orjson.dumps({"run": "adder", "phase": "Done", "step": 6, "reward": 0.5, "last_checkpoint_step": 6}).decode()
    ended = PodFacts(
        "adder-a1-x", "p1", 1, phase="Succeeded", created=1.0, end=ContainerEnd(0, message=line, finished=12.0)
    )
    said = newest_word("adder", [ended], RecordedStatus(), heard)
    assert said is not None
    assert (said.at, said.step, said.reward, said.checkpoint_step) == (12.0, 6, 0.5, 6)
    assert (
        newest_word("adder", [ended, PodFacts("adder-a2-x", "p2", 2, created=20.0)], RecordedStatus(), heard) is heard
    )
    assert newest_word("another", [ended], RecordedStatus(), heard) is heard
    killed = PodFacts("adder-a1-x", "p1", 1, phase="Failed", end=ContainerEnd(137, message="last line of a log"))
    assert newest_word("adder", [killed], RecordedStatus(), heard) is heard


def test_what_was_heard_of_an_earlier_run_of_the_same_name_is_not_this_ones() -> None:
    heard = Progress(10.0, "p1", "Running", 40)
    assert newest_word("adder", [], RecordedStatus(), heard) is None
    assert newest_word("adder", [PodFacts("adder-a1-y", "p9", 1)], RecordedStatus(), heard) is None
    assert newest_word("adder", [], RecordedStatus(attempts=(Attempt(1, pod_uid="p1"),)), heard) is heard, (
        "its pod is gone"
    )


def test_a_cleanup_that_failed_says_why_in_its_pods_last_words_or_its_controllers() -> None:
    def ended(name: str, created: float, message: str, job: str = "j") -> PodFacts:
        return PodFacts(name, name, 0, job, "Failed", created=created, end=ContainerEnd(74, "Error", message))

    job = JobFacts("adder-cleanup", "j", 0, finished="Failed", failure="BackoffLimitExceeded")
    pods = [
        ended("a", 1.0, "first"),
        ended("b", 2.0, "error: no such bucket\n  fix: make it\n"),
        ended("c", 3.0, "x", "k"),
    ]
    assert why_failed(job, pods) == "error: no such bucket fix: make it"
    assert why_failed(job, [PodFacts("d", "d", 0, "j"), ended("e", 4.0, "")]) == "BackoffLimitExceeded"
    assert why_failed(JobFacts("adder-cleanup", "j", 0), pods) == ""
    terminated = {"exitCode": 77, "reason": "Error", "message": "no right"}
    facts = read_pod(
        pod({"phase": "Failed", "containerStatuses": [{"name": "cleanup", "state": {"terminated": terminated}}]})
    )
    assert facts.end == ContainerEnd(77, "Error", "no right")
