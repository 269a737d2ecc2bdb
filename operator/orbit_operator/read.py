"""Turns one API object into its facts: which field means what. Pure.

Belongs here: reading a single OrbitRun, Job, pod or node. Does not belong here: fetching or gathering (`observe`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from orbit_operator.cache import RawRun
from orbit_operator.facts import (
    ENGINE_CONTAINER,
    RANKS_CONTAINER,
    RUN_CONTAINER,
    ContainerEnd,
    JobFacts,
    Lifecycle,
    NodeFacts,
    PodFacts,
    RanksFacts,
)
from orbit_operator.manifests.cleanup import COMPONENT as CLEANUP
from orbit_operator.manifests.source import ATTEMPT, RUN_NAME, RUN_UID
from orbit_operator.timestamps import read_time
from orbit_runtime.spec import run as spec_run
from orbit_runtime.spec.status import MAX_COUNT

GPU_CONDITIONS = ("GPU", "XID", "NVLink", "NVML", "InfiniBand")
"""A node condition that is True and whose type contains one of these reports broken hardware."""
_BY_POLICY, _EXIT_CODE = "PodFailurePolicy", re.compile(r"failed with exit code (\d+)")
_TEXT = 900

Object = Mapping[str, Any]


def pack_run(body: Object) -> RawRun:
    """The parts of an OrbitRun that are kept: everything but its managed fields."""
    metadata = {name: value for name, value in body["metadata"].items() if name != "managedFields"}
    kept = {"metadata": metadata, "spec": body.get("spec") or {}, "status": body.get("status") or {}}
    # Copy: the object that orjson returns keeps its output buffer alive, which is more than twice its size.
    return RawRun(metadata["uid"], bytes(memoryview(orjson.dumps(kept))), str(metadata.get("resourceVersion") or ""))


def has_ended(run: RawRun) -> bool:
    """Whether the run succeeded or permanently failed and is not being deleted: then only news justifies a pass."""
    body = orjson.loads(run.body)
    return bool((body.get("status") or {}).get("completionTime")) and "deletionTimestamp" not in body["metadata"]


def run_name_of(child: Object) -> str:
    return str(_labels(child).get(RUN_NAME) or "")


def run_uid_of(child: Object) -> str:
    return str(_labels(child).get(RUN_UID) or "")


def lifecycle_of(spec: Object, queue: str = "") -> Lifecycle:
    """The block as the API server has it; a field that its CRD lacks gets its default.

    Args:
        queue: the queue of a run that names none.
    """
    raw = spec.get("lifecycle") or {}
    known = {field.alias or name for name, field in spec_run.Lifecycle.model_fields.items()}
    read = spec_run.Lifecycle.model_validate({name: value for name, value in raw.items() if name in known})
    return Lifecycle(
        suspend=read.suspend,
        queue_name=read.queue_name or queue or None,
        managed_by=read.managed_by,
        ttl_seconds=read.ttl_seconds_after_finished,
        active_deadline_seconds=read.active_deadline_seconds,
        startup_deadline_seconds=read.startup_deadline_seconds,
        waiting_deadline_seconds=read.waiting_deadline_seconds,
        max_user_retries=read.max_user_retries,
        max_infra_restarts=read.max_infra_restarts,
    )


def read_job(body: Object) -> JobFacts:
    metadata, status = body["metadata"], body.get("status") or {}
    ended = {each["type"]: each for each in status.get("conditions") or () if each.get("status") == "True"}
    finished = "Complete" if "Complete" in ended else "Failed" if "Failed" in ended else None
    last = ended.get(finished or "", {})
    return JobFacts(
        name=metadata["name"],
        uid=metadata["uid"],
        attempt=_attempt(body),
        created=read_time(metadata.get("creationTimestamp")) or 0.0,
        finished=finished,  # type: ignore[arg-type]  # one of the two words, or None
        finished_at=read_time(last.get("lastTransitionTime")),
        failure=str(last.get("reason") or "") if finished == "Failed" else "",
        exit_code=_exit_code(last),
        is_suspended=bool((body.get("spec") or {}).get("suspend")),
        is_deleting="deletionTimestamp" in metadata,
        had_pod=any(status.get(name) for name in ("active", "terminating", "failed", "succeeded")),
    )


def read_ranks(body: Object) -> RanksFacts:
    metadata, status = body["metadata"], body.get("status") or {}
    failures = (each for each in status.get("conditions") or () if each.get("type") == "ReplicaFailure")
    refused = str(
        status.get("reason")
        or next((each.get("message") for each in failures if each.get("status") != "False"), "")
        or ""
    )[:_TEXT]
    return RanksFacts(
        metadata["name"], metadata["uid"], _attempt(body), "deletionTimestamp" in metadata, refused,
        is_suspended=bool((body.get("spec") or {}).get("suspend")),
    )  # fmt: skip


def read_pod(body: Object) -> PodFacts:
    metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    scheduled, disruption = conditions.get("PodScheduled", {}), conditions.get("DisruptionTarget", {})
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    run: Object = next(
        (each for each in containers if each.get("name") in (RUN_CONTAINER, RANKS_CONTAINER, CLEANUP)), {}
    )
    state = run.get("state") or {}
    begun = state.get("running") or state.get("terminated") or {}
    held: Object = next((each for each in containers if _waiting(each).get("reason") not in _NORMAL), {})
    others = [each for each in containers if each is not run]
    gates = tuple(str(each.get("name")) for each in spec.get("schedulingGates") or ())
    unplaced = scheduled.get("status") == "False" and scheduled.get("reason") != "SchedulingGated"
    owners = metadata.get("ownerReferences") or ()
    return PodFacts(
        name=metadata["name"],
        uid=metadata["uid"],
        attempt=_attempt(body),
        job_uid=next((str(owner["uid"]) for owner in owners if owner.get("kind") in ("Job", "RayCluster")), ""),
        phase=str(status.get("phase") or "Pending"),
        node=str(spec.get("nodeName") or ""),
        ip=str(status.get("podIP") or ""),
        created=read_time(metadata.get("creationTimestamp")) or 0.0,
        deletion_due=read_time(metadata.get("deletionTimestamp")),
        scheduled=read_time(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None,
        unschedulable=str(scheduled.get("message") or "")[:_TEXT] if unplaced else "",
        started=read_time(begun.get("startedAt")),
        end=_end(state.get("terminated")),
        engine_killed=any(map(_is_killed_engine, containers)),
        waiting_reason=str(_waiting(held).get("reason") or ""),
        waiting_message=str(_waiting(held).get("message") or "")[:_TEXT],
        waiting_container=str(held.get("name") or ""),
        side_failure=next(filter(None, map(_failure, others)), ""),
        still_running=tuple(str(each.get("name")) for each in others if "running" in (each.get("state") or {})),
        gates=gates,
        is_ready=conditions.get("Ready", {}).get("status") == "True",
        disruption=str(disruption.get("reason") or "") if disruption.get("status") == "True" else "",
        reason=str(status.get("reason") or ""),
        message=str(status.get("message") or disruption.get("message") or "")[:_TEXT],
    )


def read_node(body: Object) -> NodeFacts:
    conditions = {each["type"]: each for each in (body.get("status") or {}).get("conditions") or ()}
    ready = conditions.get("Ready", {})
    broken = [
        f"{kind}: {each.get('reason') or each.get('message') or 'True'}"[:_TEXT]
        for kind, each in conditions.items()
        if each.get("status") == "True" and any(word in kind for word in GPU_CONDITIONS) and "Healthy" not in kind
    ]
    is_ready = ready.get("status") == "True"
    since = None if is_ready else read_time(ready.get("lastTransitionTime"))
    return NodeFacts(body["metadata"]["name"], True, is_ready, since, tuple(sorted(broken)))


_NORMAL = ("", None, "ContainerCreating", "PodInitializing")


def _is_killed_engine(container: Object) -> bool:
    ends = ((container.get(name) or {}).get("terminated") or {} for name in ("state", "lastState"))
    return container.get("name") == ENGINE_CONTAINER and any(each.get("reason") == "OOMKilled" for each in ends)


def _exit_code(condition: Object) -> int | None:
    """The exit code, which the controller records because of the Job's failure policy."""
    found = _EXIT_CODE.search(str(condition.get("message") or "")) if condition.get("reason") == _BY_POLICY else None
    return None if found is None else int(found[1])


def _failure(container: Object) -> str:
    """How a container ended with an exit code other than 0; empty if it did not."""
    end = _end((container.get("state") or {}).get("terminated"))
    if end is None or end.exit_code == 0:
        return ""
    words = " ".join(end.message.split()) or end.reason
    return f"container {container.get('name')} ended with exit code {end.exit_code}: {words}"[:_TEXT]


def _waiting(container: Object) -> Object:
    return (container.get("state") or {}).get("waiting") or {}


def _end(terminated: Object | None) -> ContainerEnd | None:
    if not terminated:
        return None
    return ContainerEnd(
        int(terminated.get("exitCode") or 0),
        str(terminated.get("reason") or ""),
        str(terminated.get("message") or "")[:4096],
        read_time(terminated.get("finishedAt")),
    )


def _labels(body: Object) -> Mapping[str, str]:
    return body["metadata"].get("labels") or {}


def _attempt(body: Object) -> int:
    """The attempt's number; 0 for a child that is not an attempt."""
    text = _labels(body).get(ATTEMPT) or ""
    return int(text) if text.isdecimal() and int(text) <= MAX_COUNT else 0
