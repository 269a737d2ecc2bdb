"""Classifies how an attempt ended, which budget is charged, and who must act.

Belongs here: exit codes, termination messages, pod and Job conditions, each turned into a `Verdict`.
Does not belong here: whether to try again (`restart`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from orbit_operator.facts import (
    ENGINE_CONTAINER,
    RUN_CONTAINER,
    Budget,
    ContainerEnd,
    JobFacts,
    NodeFacts,
    Owner,
    PodFacts,
    Verdict,
)
from orbit_operator.reported_values import read_text
from orbit_runtime.errors import EXIT_DONE, EXIT_STOPPED

STARTUP_DEADLINE, SIDECAR_FAILED = "StartupDeadlineExceeded", "SidecarFailed"
OUT_OF_MEMORY, COLLECTIVE_FAILED, ENGINE_DIED = 79, 81, 82

EXIT_CODES: dict[int, tuple[str, Budget, Owner]] = {
    64: ("ValidationFailed", "user", "user"),
    65: ("DataUnusable", "user", "user"),
    66: ("ModelUnusable", "user", "user"),
    70: ("InternalError", "user", "orbit"),
    73: ("OutputUnavailable", "infra", "user"),
    74: ("ObjectStoreUnavailable", "infra", "cluster"),
    77: ("CredentialsInvalid", "user", "user"),
    78: ("Unsupported", "user", "user"),
    OUT_OF_MEMORY: ("OutOfMemory", "infra", "user"),
    80: ("GPUFault", "infra", "hardware"),
    COLLECTIVE_FAILED: ("CollectiveFailed", "infra", "hardware"),
    ENGINE_DIED: ("EngineDied", "infra", "cluster"),
    83: ("Stalled", "infra", "cluster"),
    84: ("GateFailed", "user", "user"),
    85: ("RewardNonFinite", "user", "user"),
    86: ("RewardsFailing", "user", "user"),
    # Not Orbit's own codes: those of a shell, a kernel or an interpreter.
    126: ("CommandNotFound", "user", "user"),
    127: ("CommandNotFound", "user", "user"),
    128: ("CommandNotFound", "user", "user"),
    134: ("Crashed", "infra", "hardware"),
    135: ("Crashed", "infra", "hardware"),
    137: ("Killed", "infra", "cluster"),
    139: ("Crashed", "infra", "hardware"),
    143: ("Interrupted", "infra", "cluster"),
}
"""Exit code → reason, budget charged at the first occurrence, who must act. Any other code is a bug
(`InternalError`)."""

STORAGE_LIMIT = "StorageLimitExceeded"
FIRST_INFRA_THEN_USER = frozenset({"OutOfMemory", STORAGE_LIMIT, "GPUFault", "CollectiveFailed", "Crashed"})
"""The fault may be the machine's or the program's: a repetition without progress in between is the program's."""

AVOID_NODE = frozenset(
    {"GPUFault", "CollectiveFailed", "Crashed", "NodeLost", "NodeShutdown", "PodRejected", STARTUP_DEADLINE}
)
"""Reasons to avoid the node."""

WAITING: dict[str, tuple[str, Owner]] = {
    "ImagePullBackOff": ("ImagePullFailed", "user"),
    "ErrImagePull": ("ImagePullFailed", "user"),
    "InvalidImageName": ("ImagePullFailed", "user"),
    "ErrImageNeverPull": ("ImagePullFailed", "user"),
    "RegistryUnavailable": ("ImagePullFailed", "cluster"),
    "CreateContainerConfigError": ("ConfigurationMissing", "user"),
    "CreateContainerError": ("ContainerNotCreated", "cluster"),
    "RunContainerError": ("ContainerNotCreated", "user"),
    "CrashLoopBackOff": (SIDECAR_FAILED, "cluster"),
}
"""The kubelet's reason for a container that does not start → our reason, who must act."""

_DISRUPTIONS: dict[str, tuple[str, Owner]] = {
    "PreemptionByScheduler": ("Preempted", "none"),
    "EvictionByEvictionAPI": ("Drained", "none"),
    "TerminationByKubelet": ("Evicted", "cluster"),
    "DeletionByTaintManager": ("NodeLost", "cluster"),
    "DeletionByPodGC": ("NodeLost", "cluster"),
}
_SHUTDOWNS = ("Terminated", "NodeShutdown", "Shutdown")
"""The kubelet's reasons for a pod that it ends because its node shuts down."""
_MORE_STORAGE = "raise placement.modelCache.sizeLimit or placement.resources.ephemeralStorage, or mount a claim"
_REJECTIONS = (
    "UnexpectedAdmissionError",
    "NodeAffinity",
    "NodeShutdown",
    "Terminated",
    "Shutdown",
    "OutOf",
    "Topology",
)
_MESSAGE_LIMIT = 1024
_LONGEST = 4096
"""Bytes of a termination message that the kubelet keeps."""


def judge_job(job: JobFacts | None, pod: PodFacts | None, node: NodeFacts | None) -> Verdict:
    """The verdict on an attempt that is over.

    Args:
        job: None if the Job was deleted before it ended.
        pod: the newest pod; None if it is gone.
        node: the node of that pod; None if it was not read.
    """
    if pod is not None and pod.end is not None:
        return _with_node(_judge_exit(pod.end, pod), node)
    known_by_job = job is not None and job.exit_code is not None
    if pod is not None and (pod.is_terminal or pod.disruption) and not known_by_job:
        return _with_node(_judge_pod(pod), node)
    if job is not None and job.finished == "Complete":
        return Verdict("Succeeded", "Succeeded", exit_code=EXIT_DONE)
    if job is None and pod is None:
        return Verdict("Stopped", "JobWithdrawn", "free", message="the Job was deleted before it had a pod")
    if job is None:
        return Verdict("Failed", "JobDeleted", "infra", "cluster", "the Job of this attempt was deleted while it ran")
    if job.exit_code is not None:
        gone = PodFacts("", "", job.attempt, is_ready=False)
        return _with_node(_judge_exit(ContainerEnd(job.exit_code), gone), node)
    return Verdict("Failed", "PodGone", "infra", "cluster", f"the pod is gone without a trace ({job.failure})")


def judge_lost(pod: PodFacts) -> Verdict:
    """The verdict on an attempt whose pod is on an unreachable node."""
    where = f"node {pod.node} is not ready"
    return Verdict("Failed", "NodeLost", "infra", "cluster", f"{where}; its pod is fenced off", avoid_node=True)


def judge_ranks(verdict: Verdict, pods: Sequence[PodFacts], *, taken_back: bool = False) -> Verdict:
    """The verdict on an attempt whose ranks did not join, or went: their own pods, if one is not well, know better.

    Ranks that were never placed cost no restart: the run waits for nodes, as it does on one node.

    Args: taken_back: whether a queue has suspended the RayCluster, which costs none either.
    """
    if verdict.reason != EXIT_CODES[COLLECTIVE_FAILED][0]:
        return verdict
    if taken_back:
        message = "the queue took the run's other nodes back"
        return Verdict("Failed", "Preempted", "free", "cluster", message, verdict.exit_code)
    for pod in pods:
        found: Verdict | None = None
        if pod.unschedulable or pod.gates:
            why = pod.unschedulable or f"held by its scheduling gates: {', '.join(pod.gates)}"
            found = Verdict("Failed", "Unschedulable", "free", "cluster", why)
        elif (waits := find_waiting(pod)) is not None:
            found = Verdict("Failed", waits[0], "infra", waits[1], waits[2])
        elif pod.phase == "Failed" or pod.disruption:
            found = _judge_exit(pod.end, pod) if pod.end is not None else _judge_pod(pod)
        if found is not None:
            message = _cut(f"pod {pod.name} on another of the run's nodes: {found.message}")
            return replace(found, message=message, exit_code=verdict.exit_code, avoid_node=False)
    return verdict


def judge_startup(verdict: Verdict, reason: str, message: str) -> Verdict:
    """The verdict on an attempt that we ended because it did not train within its start-up deadline.

    Args:
        verdict: the verdict on the ending alone; a failure that explains itself is kept.
        reason: what the attempt waited for, according to the last status.
    """
    if verdict.reason not in ("Checkpointed", "Killed", "Interrupted", "PodGone", "JobWithdrawn", "JobDeleted"):
        return verdict
    owner: Owner = next((owner for name, owner in WAITING.values() if name == reason), "cluster")
    budget: Budget = "user" if owner == "user" else "infra"
    text = _cut(f"{reason}: {message}" if message else reason)
    return Verdict("Failed", STARTUP_DEADLINE, budget, owner, text, verdict.exit_code, avoid_node=True)


def find_waiting(pod: PodFacts) -> tuple[str, Owner, str] | None:
    """Why a pod does not start: reason, who must act, message. None if nothing is wrong."""
    if pod.waiting_reason not in WAITING:
        return None
    reason, owner = WAITING[pod.waiting_reason]
    if reason == SIDECAR_FAILED and pod.waiting_container == ENGINE_CONTAINER:
        reason = EXIT_CODES[ENGINE_DIED][0]
    text = pod.waiting_message or pod.waiting_reason
    beside = pod.waiting_container not in ("", RUN_CONTAINER)
    return reason, owner, _cut(f"container {pod.waiting_container}: {text}" if beside else text)


def read_termination(message: str) -> dict[str, Any]:
    """The termination message as an object; `{"message": …}` if it is plain text."""
    try:
        facts = json.loads(message)
    except (ValueError, RecursionError):
        facts = None
    return facts if isinstance(facts, dict) else _read_log(message)


def _read_log(text: str) -> dict[str, Any]:
    """The last lines of a log, which the kubelet supplies if no message was left."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for index in reversed(range(len(lines))):
        if lines[index].startswith("error: "):
            fix = next((line for line in lines[index + 1 :] if line.startswith("fix: ")), "")
            return {"message": lines[index].removeprefix("error: "), "fix": fix.removeprefix("fix: ")}
    return {"message": lines[-1]} if lines else {}


def _judge_exit(end: ContainerEnd, pod: PodFacts) -> Verdict:
    said = read_termination(end.message)
    message = _cut(_sentence(said))
    if end.exit_code == EXIT_DONE:
        return Verdict("Succeeded", "Succeeded", exit_code=EXIT_DONE, message=message)
    if end.exit_code == EXIT_STOPPED:
        why = message if _is_left(end.message) else _tell_request(pod) or message
        return Verdict("Stopped", "Checkpointed", "free", exit_code=EXIT_STOPPED, message=why)
    if end.reason == "OOMKilled":
        reason, budget, owner = EXIT_CODES[OUT_OF_MEMORY]
        text = _tell_kill("the container used more memory than its limit", end)
        return Verdict("Failed", reason, budget, owner, text, end.exit_code)
    if end.exit_code in (137, 143):
        return _judge_killed(end, pod)
    if end.exit_code == ENGINE_DIED and pod.engine_killed:
        reason, budget, owner = EXIT_CODES[OUT_OF_MEMORY]
        text = _cut(f"the engine's container used more memory than its limit; {message}".removesuffix("; "))
        return Verdict("Failed", reason, budget, owner, text, end.exit_code)
    reason, budget, owner = EXIT_CODES.get(end.exit_code, ("InternalError", "user", "orbit"))
    text = message or f"the container ended with exit code {end.exit_code} and no message"
    return Verdict("Failed", reason, budget, owner, text, end.exit_code, reason in AVOID_NODE)


def _judge_killed(end: ContainerEnd, pod: PodFacts) -> Verdict:
    """The verdict on a process that was killed without a request to stop; the pod shows by whom."""
    if pod.disruption or pod.reason:
        verdict = _judge_pod(pod)
        return Verdict("Failed", verdict.reason, "infra", verdict.owner, _tell_kill(verdict.message, end),
                       end.exit_code, verdict.avoid_node)  # fmt: skip
    reason, budget, owner = EXIT_CODES[end.exit_code]
    how = "killed before it could checkpoint" if pod.is_deleting else "killed, for an unknown reason"
    return Verdict("Failed", reason, budget, owner, _tell_kill(how, end), end.exit_code)


def _tell_request(pod: PodFacts) -> str:
    """Who asked the process to stop; empty if unknown."""
    if not pod.disruption and not pod.reason:
        return ""
    asked = _judge_pod(pod)
    return _cut(f"{asked.reason}: {asked.message}")


def _tell_kill(how: str, end: ContainerEnd) -> str:
    """What killed the process. A message that it left takes precedence; the last line of its log is only appended."""
    said = "" if end.reason == "ContainerStatusUnknown" else _sentence(read_termination(end.message))
    if not said:
        return _cut(how)
    return _cut(said if _is_left(end.message) else f"{how}; its last words: {said}")


def _is_left(message: str) -> bool:
    """Whether the container left this message; otherwise it is the end of the log, which the kubelet substitutes."""
    return message.lstrip().startswith("{") and "message" in read_termination(message)


def _judge_pod(pod: PodFacts) -> Verdict:
    """The verdict on a pod that ended without a report from its container."""
    text = _cut(pod.message or pod.reason or pod.disruption)
    owner: Owner
    if pod.disruption == "TerminationByKubelet" and pod.reason in _SHUTDOWNS:
        reason, owner = "NodeShutdown", "none"
    elif pod.disruption in _DISRUPTIONS:
        reason, owner = _DISRUPTIONS[pod.disruption]
    elif pod.reason == "Evicted":
        # Without the condition, the pod itself caused the eviction: it outgrew a limit of its own.
        reason, owner, text = STORAGE_LIMIT, "user", _cut(f"{text}; {_MORE_STORAGE}")
    elif pod.side_failure and pod.started is None:
        reason, owner, text = SIDECAR_FAILED, "cluster", _cut(pod.side_failure)
    elif pod.reason.startswith(_REJECTIONS):
        reason, owner = "PodRejected", "cluster"
    elif pod.phase == "Succeeded":
        return Verdict("Succeeded", "Succeeded", exit_code=EXIT_DONE)
    else:
        reason, owner = "PodGone", "cluster"
    return Verdict("Failed", reason, "infra", owner, text, avoid_node=reason in AVOID_NODE)


def _with_node(verdict: Verdict, node: NodeFacts | None) -> Verdict:
    """Blames the node if it reports broken GPUs, which explain a crash of the program."""
    suspicious = verdict.reason in ("Crashed", "CollectiveFailed", "EngineDied", "Stalled", "Killed")
    if node is None or not node.problems or not suspicious:
        return verdict
    message = f"{verdict.message} (node {node.name}: {', '.join(node.problems)})"
    return Verdict("Failed", "GPUFault", "infra", "hardware", _cut(message), verdict.exit_code, avoid_node=True)


def _sentence(said: dict[str, Any]) -> str:
    where, message, fix = (read_text(said, name, _LONGEST) or "" for name in ("where", "message", "fix"))
    head = f"{where}: {message}" if where and message else message
    return f"{head}; {fix}" if fix else head


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MESSAGE_LIMIT else text[: _MESSAGE_LIMIT - 1] + "…"
