"""Which version of Kueue's API is asked, how often, and what is read of a Workload."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("kopf", reason="the operator's packages are not installed (extra `operator`)")

from orbit_operator.api import Api, ApiError, Body, Kind
from orbit_operator.facts import QueueFacts
from orbit_operator.observe import ABSENT_SECONDS, Kueue, read_workload

NO_ROOM = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "no room"}
WAITS = QueueFacts("Pending", "no room")


class Serving(Api):
    """In place of an API server: lists one Workload in the versions that it serves, and counts who asks for what."""

    def __init__(self, *versions: str) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.versions = versions
        self.refuses: int | None = None
        self.asked: list[str] = []

    async def call(self, verb: str, kind: Kind, *_: Any, **__: Any) -> Body:
        version = kind.prefix.rpartition("/")[2]
        self.asked.append(version)
        if self.refuses is not None:
            raise ApiError(self.refuses, "Refused", "no")
        if version not in self.versions:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        return {"items": [{"status": {"conditions": [NO_ROOM]}}]}


def ask(kueue: Kueue, api: Serving) -> tuple[QueueFacts | None, list[str]]:
    """The answer, and the versions that were asked for it."""
    api.asked.clear()
    return asyncio.run(kueue.ask("team", "job")), list(api.asked)


def test_the_newest_version_is_asked_first() -> None:
    api = Serving("v1beta1", "v1beta2")
    assert ask(Kueue(api), api) == (WAITS, ["v1beta2"])


def test_an_older_kueue_is_found_and_remembered() -> None:
    api = Serving("v1beta1")
    kueue = Kueue(api)
    assert ask(kueue, api) == (WAITS, ["v1beta2", "v1beta1"])
    assert ask(kueue, api) == (WAITS, ["v1beta1"])


def test_a_version_that_went_is_forgotten_and_the_other_one_answers_at_once() -> None:
    api = Serving("v1beta1")
    kueue = Kueue(api)
    ask(kueue, api)
    api.versions = ("v1beta2",)
    assert ask(kueue, api) == (WAITS, ["v1beta1", "v1beta2"])
    assert ask(kueue, api) == (WAITS, ["v1beta2"])


def test_where_there_is_no_kueue_it_is_looked_for_once_in_a_while() -> None:
    now = 0.0
    api = Serving()
    kueue = Kueue(api, lambda: now)
    assert ask(kueue, api) == (None, ["v1beta2", "v1beta1"])
    now = ABSENT_SECONDS - 1
    assert ask(kueue, api) == (None, [])
    now = ABSENT_SECONDS
    api.versions = ("v1beta1",)
    assert ask(kueue, api) == (WAITS, ["v1beta2", "v1beta1"])
    api.versions = ()
    assert ask(kueue, api) == (None, ["v1beta1", "v1beta2"])


@pytest.mark.parametrize("status", [0, 403, 500])
def test_an_answer_that_says_nothing_of_the_version_changes_nothing(status: int) -> None:
    api = Serving("v1beta1")
    kueue = Kueue(api)
    ask(kueue, api)
    api.refuses = status
    assert ask(kueue, api) == (None, ["v1beta1"])
    api.refuses = None
    assert ask(kueue, api) == (WAITS, ["v1beta1"])


@pytest.mark.parametrize(
    ("conditions", "facts"),
    [
        ([], QueueFacts("QueuedByKueue", "waiting for the queue")),
        ([NO_ROOM], WAITS),
        ([NO_ROOM, {"type": "Evicted", "status": "True", "reason": "Preempted"}], QueueFacts("Preempted")),
        ([NO_ROOM, {"type": "Evicted", "status": "False", "reason": "QuotaReserved"}], WAITS),
        ([{"type": "QuotaReserved", "status": "True"}, {"type": "Admitted", "status": "False", "reason": "NoChecks"}],
         QueueFacts("NoChecks")),
        ([{**NO_ROOM, "lastTransitionTime": "2026-01-01T01:00:00Z"},
          {"type": "Evicted", "status": "True", "reason": "Old", "lastTransitionTime": "2026-01-01T00:00:00Z"}], WAITS),
        ([{"type": "Admitted", "status": "True"}], QueueFacts("QueuedByKueue", "waiting for the queue")),
    ],
)  # fmt: skip
def test_the_condition_that_says_most_is_read(conditions: list[Body], facts: QueueFacts) -> None:
    assert read_workload({"status": {"conditions": conditions}}) == facts


def test_an_admission_check_that_holds_the_job_is_named() -> None:
    status = {
        "conditions": [{"type": "QuotaReserved", "status": "True"}],
        "admissionChecks": [
            {"name": "budget", "state": "Ready", "message": "paid"},
            {"name": "provision", "state": "Pending", "message": "not enough resources, ETA 05:00"},
        ],
    }
    expected = QueueFacts("AdmissionCheckPending", "admission check provision: not enough resources, ETA 05:00")
    assert read_workload({"status": status}) == expected
