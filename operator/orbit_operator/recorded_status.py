"""The run's own `status`, read back as facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from orbit_operator.facts import Attempt, Budget, Condition, Owner, RecordedStatus, Result, Verdict
from orbit_operator.timestamps import read_time


def read_stored(status: Mapping[str, Any]) -> RecordedStatus:
    """Reads what the status remembers; unreadable parts count as absent."""
    attempts = [_attempt(each) for each in _list(status.get("attempts"))]
    conditions = [_condition(each) for each in _list(status.get("conditions"))]
    retired = status.get("retired")
    return RecordedStatus(
        attempts=tuple(sorted((each for each in attempts if each is not None), key=lambda each: each.number)),
        conditions={each.type: each for each in conditions if each is not None},
        retired={name: float(value) for name, value in retired.items()} if isinstance(retired, Mapping) else {},
        finished_at=read_time(status.get("completionTime")),
        raw=status,
    )


def _attempt(fields: Any) -> Attempt | None:
    if not isinstance(fields, Mapping) or not isinstance(fields.get("number"), int):
        return None
    checkpoint, ending = (_mapping(fields.get(name)) for name in ("checkpoint", "ending"))
    return Attempt(
        number=fields["number"],
        job_uid=_text(fields, "jobUID"),
        pod_uid=_text(fields, "podUID"),
        pod=_text(fields, "pod"),
        node=_text(fields, "node"),
        created=read_time(fields.get("createTime")),
        scheduled=read_time(fields.get("scheduleTime")),
        started=read_time(fields.get("startTime")),
        answered=read_time(fields.get("answerTime")),
        running=read_time(fields.get("runTime")),
        ended=read_time(ending.get("time")),
        step=int(fields.get("step") or 0),
        checkpoint_step=checkpoint.get("step"),
        checkpoint_at=read_time(checkpoint.get("time")),
        earlier_seconds=float(fields.get("earlierSeconds") or 0.0),
        verdict=_verdict(ending),
    )


def _verdict(fields: Mapping[str, Any]) -> Verdict | None:
    result = fields.get("result")
    if result not in ("Succeeded", "Stopped", "Failed"):
        return None
    budget = _text(fields, "budget").lower()
    return Verdict(
        result=cast(Result, result),
        reason=_text(fields, "reason"),
        budget=cast(Budget, budget if budget in ("free", "infra", "user") else "infra"),
        owner=read_owner(fields),
        message=_text(fields, "message"),
        exit_code=fields.get("exitCode"),
        avoid_node=fields.get("avoidNode") is True,
    )


def read_owner(fields: Mapping[str, Any]) -> Owner:
    """The owner in `whoActs` of a status or an ending."""
    owner = _text(fields, "whoActs").lower()
    return cast(Owner, owner if owner in ("user", "cluster", "hardware", "orbit") else "none")


def _condition(fields: Any) -> Condition | None:
    if not isinstance(fields, Mapping) or fields.get("status") not in ("True", "False", "Unknown"):
        return None
    since = read_time(fields.get("lastTransitionTime"))
    generation = fields.get("observedGeneration")
    return Condition(
        _text(fields, "type"), fields["status"], _text(fields, "reason"), _text(fields, "message"),
        0.0 if since is None else since, generation if isinstance(generation, int) else 0,
    )  # fmt: skip


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
