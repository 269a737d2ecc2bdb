"""Every way an attempt can end, and whose it is."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import orbit_runtime.errors as errors
from orbit_operator.facts import ContainerEnd, JobFacts, NodeFacts, PodFacts
from orbit_operator.policies.failure import (
    EXIT_CODES,
    find_waiting,
    judge_job,
    judge_lost,
    judge_startup,
    read_termination,
)

FAILED_JOB = JobFacts("adder-a1", "j", 1, finished="Failed", failure="BackoffLimitExceeded")


def pod(code: int | None = None, message: str = "", **fields: Any) -> PodFacts:
    end = None if code is None else ContainerEnd(code, fields.pop("end_reason", ""), message, finished=9.0)
    phase = "Succeeded" if code == 0 else "Failed"
    return PodFacts("adder-a1-x", "p", 1, "j", **{"phase": phase, "node": "n0", "end": end, **fields})


@pytest.mark.parametrize(
    ("code", "reason", "budget", "owner"),
    [
        (64, "ValidationFailed", "user", "user"),
        (65, "DataUnusable", "user", "user"),
        (66, "ModelUnusable", "user", "user"),
        (70, "InternalError", "user", "orbit"),
        (73, "OutputUnavailable", "infra", "user"),
        (74, "ObjectStoreUnavailable", "infra", "cluster"),
        (77, "CredentialsInvalid", "user", "user"),
        (78, "Unsupported", "user", "user"),
        (79, "OutOfMemory", "infra", "user"),
        (80, "GPUFault", "infra", "hardware"),
        (81, "CollectiveFailed", "infra", "hardware"),
        (82, "EngineDied", "infra", "cluster"),
        (83, "Stalled", "infra", "cluster"),
        (84, "GateFailed", "user", "user"),
        (85, "RewardNonFinite", "user", "user"),
        (86, "RewardsFailing", "user", "user"),
        (1, "InternalError", "user", "orbit"),
        (127, "CommandNotFound", "user", "user"),
        (139, "Crashed", "infra", "hardware"),
        (137, "Killed", "infra", "cluster"),
        (143, "Interrupted", "infra", "cluster"),
        (200, "InternalError", "user", "orbit"),
    ],
)
def test_each_exit_code_has_its_class(code: int, reason: str, budget: str, owner: str) -> None:
    verdict = judge_job(FAILED_JOB, pod(code), None)
    assert (verdict.result, verdict.reason, verdict.budget, verdict.owner) == ("Failed", reason, budget, owner)
    assert verdict.exit_code == code
    assert verdict.message


def test_every_exit_code_of_the_runtime_is_known_and_says_the_same_owner() -> None:
    """Where the table charges a first occurrence to the infrastructure, the owner may be the machine's instead."""
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.OrbitError) and error is not errors.StoppedOnRequest:
            reason, _, owner = EXIT_CODES[error.exit_code]
            assert owner == error.who_acts, (error.__name__, reason)


def test_a_done_and_a_checkpointed_run_cost_nothing() -> None:
    assert judge_job(FAILED_JOB, pod(0), None).result == "Succeeded"
    stopped = judge_job(FAILED_JOB, pod(75), None)
    assert (stopped.result, stopped.reason, stopped.budget, stopped.owner) == (
        "Stopped",
        "Checkpointed",
        "free",
        "none",
    )


@pytest.mark.parametrize(
    ("fields", "reason", "owner"),
    [
        ({"disruption": "PreemptionByScheduler"}, "Preempted", "none"),
        ({"disruption": "EvictionByEvictionAPI"}, "Drained", "none"),
        ({"disruption": "TerminationByKubelet", "reason": "Terminated"}, "NodeShutdown", "none"),
        ({"disruption": "TerminationByKubelet", "reason": "Evicted"}, "Evicted", "cluster"),
        ({"reason": "Evicted", "message": 'Usage of EmptyDir volume "cache"'}, "StorageLimitExceeded", "user"),
        ({"reason": "UnexpectedAdmissionError"}, "PodRejected", "cluster"),
        ({"reason": "OutOfnvidia.com/gpu"}, "PodRejected", "cluster"),
        ({"disruption": "DeletionByTaintManager"}, "NodeLost", "cluster"),
    ],
)
@pytest.mark.parametrize("code", [None, 137, 143])
def test_a_pod_that_something_else_ended_says_what(
    fields: dict[str, Any], reason: str, owner: str, code: int | None
) -> None:
    verdict = judge_job(FAILED_JOB, pod(code, **fields), None)
    assert (verdict.reason, verdict.budget, verdict.owner) == (reason, "infra", owner)


def test_a_container_that_a_webhook_added_may_fail_before_the_run_starts() -> None:
    failed = pod(side_failure="container vault-agent-init ended with exit code 1: denied")
    verdict = judge_job(FAILED_JOB, failed, None)
    assert (verdict.reason, verdict.budget, verdict.owner) == ("SidecarFailed", "infra", "cluster")
    assert verdict.message == failed.side_failure


def test_a_checkpoint_that_something_asked_for_says_what() -> None:
    evicted = replace(pod(75, reason="Evicted"), message='Usage of EmptyDir volume "cache" exceeds the limit "1Ti".')
    verdict = judge_job(FAILED_JOB, evicted, None)
    assert (verdict.reason, verdict.budget) == ("Checkpointed", "free")
    assert verdict.message.startswith('StorageLimitExceeded: Usage of EmptyDir volume "cache" exceeds the limit "1Ti".')
    assert "placement.modelCache.sizeLimit" in verdict.message
    drained = replace(pod(75, "the end of a log", disruption="EvictionByEvictionAPI"), message="Eviction API: evicting")
    assert judge_job(FAILED_JOB, drained, None).message == "Drained: Eviction API: evicting"
    assert judge_job(FAILED_JOB, pod(75), None).message == ""


def test_a_container_out_of_memory_is_not_just_killed() -> None:
    verdict = judge_job(FAILED_JOB, pod(137, end_reason="OOMKilled"), None)
    assert (verdict.reason, verdict.budget) == ("OutOfMemory", "infra")
    assert "memory" in verdict.message


def test_an_engine_that_was_killed_for_its_memory_is_not_just_dead() -> None:
    said = json.dumps({"message": "no agent answers"})
    dead, killed = (judge_job(FAILED_JOB, replace(pod(82, said), engine_killed=each), None) for each in (False, True))
    assert (dead.reason, dead.message) == ("EngineDied", "no agent answers")
    assert (killed.reason, killed.budget, killed.owner, killed.exit_code) == ("OutOfMemory", "infra", "user", 82)
    assert killed.message == "the engine's container used more memory than its limit; no agent answers"
    silent = judge_job(FAILED_JOB, replace(pod(82), engine_killed=True), None)
    assert silent.message == "the engine's container used more memory than its limit"
    assert judge_job(FAILED_JOB, replace(pod(66, said), engine_killed=True), None).reason == "ModelUnusable"


def test_what_killed_a_container_comes_before_the_end_of_its_log() -> None:
    """The kubelet gives the end of the log where the process left no message, which nobody who is killed does."""
    log, own = "step 3 of 60\n", json.dumps({"message": "not enough", "fix": "more memory"})
    full = "the node was low on resource: memory"
    for fields, how in (
        ({"end_reason": "OOMKilled"}, "the container used more memory than its limit"),
        ({"reason": "Evicted", "disruption": "TerminationByKubelet", "message_of_pod": full}, full),
        ({"deletion_due": 5.0}, "killed before it could checkpoint"),
        ({}, "killed, for an unknown reason"),
    ):
        facts: dict[str, Any] = {**fields}
        message = facts.pop("message_of_pod", "")
        ended = replace(pod(137, log, **facts), message=message)
        assert judge_job(FAILED_JOB, ended, None).message == f"{how}; its last words: step 3 of 60"
        silent = replace(pod(137, json.dumps({"step": 3}), **facts), message=message)
        assert judge_job(FAILED_JOB, silent, None).message == how
        told = replace(pod(137, own, **facts), message=message)
        assert judge_job(FAILED_JOB, told, None).message == "not enough; more memory"
        unknown = "The container could not be located when the pod was terminated"
        gone = replace(pod(137, unknown, **{**facts, "end_reason": "ContainerStatusUnknown"}), message=message)
        if facts.get("end_reason") != "OOMKilled":
            assert judge_job(FAILED_JOB, gone, None).message == how


def test_a_crash_on_a_node_with_a_broken_gpu_is_the_gpus() -> None:
    node = NodeFacts("n0", problems=("XID 79",))
    for code in (81, 82, 83, 137, 139):
        verdict = judge_job(FAILED_JOB, pod(code), node)
        assert (verdict.reason, verdict.owner, verdict.avoid_node) == ("GPUFault", "hardware", True)
    assert judge_job(FAILED_JOB, pod(65), node).reason == "DataUnusable"


def test_what_vanished_is_the_clusters_and_what_never_ran_is_free() -> None:
    assert judge_job(FAILED_JOB, None, None).reason == "PodGone"
    running = pod(phase="Failed")
    assert judge_job(None, running, None).budget == "infra"
    withdrawn = judge_job(None, None, None)
    assert (withdrawn.reason, withdrawn.budget) == ("JobWithdrawn", "free")
    lost = judge_lost(pod(phase="Running"))
    assert (lost.reason, lost.budget, lost.avoid_node) == ("NodeLost", "infra", True)


def test_the_termination_message_becomes_one_line() -> None:
    said = errors.CredentialsError("the store refused the key", where="s3://models", fix="check the secret").to_json()
    verdict = judge_job(FAILED_JOB, pod(77, json.dumps(said)), None)
    assert verdict.message == "s3://models: the store refused the key; check the secret"


def test_a_log_instead_of_a_message_is_searched_for_its_error() -> None:
    log = "step 3\nerror: s3://b: no such bucket\n  fix: make it\nbye\n"
    assert read_termination(log) == {"message": "s3://b: no such bucket", "fix": "make it"}
    assert read_termination("just this\n") == {"message": "just this"}
    assert read_termination("") == {}
    assert read_termination("[1, 2]") == {"message": "[1, 2]"}


def test_a_message_of_any_length_stays_short() -> None:
    verdict = judge_job(FAILED_JOB, pod(65, "x" * 100_000), None)
    assert len(verdict.message) <= 1024


def test_a_start_that_took_too_long_is_whoever_it_waited_for() -> None:
    checkpointed = judge_job(FAILED_JOB, pod(75), None)
    image = judge_startup(checkpointed, "ImagePullFailed", "no such image")
    assert (image.reason, image.budget, image.owner) == ("StartupDeadlineExceeded", "user", "user")
    slow = judge_startup(checkpointed, "ModelLoading", "")
    assert (slow.budget, slow.owner, slow.avoid_node) == ("infra", "cluster", True)
    own = judge_job(FAILED_JOB, pod(77), None)
    assert judge_startup(own, "ModelLoading", "") == own


@pytest.mark.parametrize(
    ("word", "reason", "owner"),
    [
        ("ImagePullBackOff", "ImagePullFailed", "user"),
        ("CreateContainerConfigError", "ConfigurationMissing", "user"),
        ("ContainerCreating", None, None),
        ("", None, None),
    ],
)
def test_a_container_that_does_not_start_says_who_must_act(word: str, reason: str | None, owner: str | None) -> None:
    found = find_waiting(PodFacts("p", "u", 1, waiting_reason=word, waiting_message="why"))
    assert (found and found[0], found and found[1]) == (reason, owner)


@pytest.mark.parametrize(("container", "reason"), [("engine", "EngineDied"), ("istio-proxy", "SidecarFailed")])
def test_a_container_that_crashes_again_and_again_is_named(container: str, reason: str) -> None:
    waits = PodFacts("p", "u", 1, waiting_reason="CrashLoopBackOff", waiting_message="x", waiting_container=container)
    assert find_waiting(waits) == (reason, "cluster", f"container {container}: x")
