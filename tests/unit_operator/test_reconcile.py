"""The order in which one pass tells the API server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("kopf", reason="the operator's packages are not installed (extra `operator`)")

from orbit_operator.api import LEASES, Api, ApiError, Body, Kind
from orbit_operator.cache import Child, Key
from orbit_operator.crd_check import wait_for_crd
from orbit_operator.ending import FINALIZER
from orbit_operator.facts import JobFacts, Progress
from orbit_operator.intake import put_child
from orbit_operator.lease import LeaseLostError
from orbit_operator.main import Operator
from orbit_operator.namespaces import EVERYWHERE, PLURALS
from orbit_operator.read import pack_run
from orbit_operator.reconcile import reconcile
from orbit_operator.settings import Settings
from orbit_operator.timestamps import format_time

KEY: Key = ("team", "adder")
HEAD = {"namespace": "team", "name": "adder", "uid": "r", "resourceVersion": "1"}
SPEC: dict[str, Any] = {
    "model": {"uri": "builtin://tiny-adder"},
    "data": {"prompts": [{"uri": "builtin://two-digit-addition"}]},
    "environment": {"rewards": [{"name": "correct", "type": "ExactMatch"}]},
    "training": {"steps": 10},
    "storage": {"uri": "s3://runs/team", "credentialsSecretName": "store"},
}


class Answering(Api):
    """In place of an API server: takes every write, except of kinds for which it was given an error."""

    def __init__(self, **errors: Exception) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.errors = errors
        self.writes: list[str] = []

    async def call(self, verb: str, kind: Kind, *_: Any, body: Mapping[str, Any] | None = None, **__: Any) -> Body:
        if verb == "GET":
            if kind is LEASES:
                raise ApiError(404, "NotFound", "")
            return {"items": []}
        await asyncio.sleep(0)
        if kind is LEASES:
            return {}
        self.writes.append(kind.plural)
        if kind.plural in self.errors:
            raise self.errors[kind.plural]
        assert body is not None
        return {
            **body,
            "metadata": {
                "namespace": "team",
                "name": "adder",
                "uid": "of-the-server",
                **body["metadata"],
                "resourceVersion": "2",
            },
        }


def pass_over(api: Api, head: Mapping[str, Any] = HEAD, jobs: Sequence[JobFacts] = (), **spec: Any) -> None:
    """One pass over a run, which is new unless it has Jobs."""
    operator = Operator(Settings(runtime_image="orbit-runtime:1"), api)
    made = {"apiVersion": "orbitrl.dev/v1alpha1", "kind": "OrbitRun", "metadata": head, "spec": {**SPEC, **spec}}
    for job in jobs:
        operator.cache.put_job(KEY, Child("r", job), 1)
    operator.cache.runs.put(KEY, "r", pack_run(made), 1)
    asyncio.run(reconcile(KEY, operator.parts))


def test_a_status_is_written_when_all_that_it_says_was_told() -> None:
    """What dies before the status tells it again; after it nobody would."""
    api = Answering()
    pass_over(api)
    assert sorted(api.writes[:2]) == ["configmaps", "networkpolicies"]
    assert api.writes[2:] == ["jobs", "events", "orbitruns"]


def test_that_a_run_is_suspended_is_told_before_its_status_says_so() -> None:
    api = Answering()
    pass_over(api, lifecycle={"suspend": True})
    assert api.writes == ["events", "orbitruns"]


def test_what_stays_of_a_run_is_told_before_the_run_can_be_gone() -> None:
    api = Answering()
    head = {**HEAD, "deletionTimestamp": format_time(time.time()), "finalizers": [FINALIZER]}
    failed = JobFacts("adder-cleanup", "j", 0, finished="Failed", failure="DeadlineExceeded")
    pass_over(api, head, [failed])
    assert api.writes == ["events", "orbitruns"]


def test_a_cleanup_that_is_refused_is_told_in_the_servers_words() -> None:
    api = Answering(jobs=ApiError(403, "Forbidden", "exceeded quota: small"))
    head = {**HEAD, "deletionTimestamp": format_time(time.time()), "finalizers": [FINALIZER]}
    with pytest.raises(ApiError, match="exceeded quota"):
        pass_over(api, head)
    assert api.writes == ["jobs", "events"]


def test_an_event_that_is_refused_holds_up_nothing() -> None:
    api = Answering(events=ApiError(403, "Forbidden", "no events here"))
    pass_over(api)
    assert api.writes[2:] == ["jobs", "events", "orbitruns"]


def test_a_pass_ends_where_the_lease_is_lost() -> None:
    api = Answering(events=LeaseLostError("held by another"))
    with pytest.raises(LeaseLostError):
        pass_over(api)
    assert api.writes[2:] == ["jobs", "events"]


@pytest.mark.parametrize(("namespaces", "place"), [((), EVERYWHERE), (("team", "other"), "team")])
def test_nothing_is_done_before_each_kind_was_listed(namespaces: tuple[str, ...], place: str) -> None:
    """A Job that is not seen yet would be made a second time."""

    async def work() -> None:
        api = Answering()
        operator = Operator(Settings(runtime_image="orbit-runtime:1", namespaces=namespaces), api)
        made = {"apiVersion": "orbitrl.dev/v1alpha1", "kind": "OrbitRun", "metadata": HEAD, "spec": SPEC}
        operator.cache.runs.put(KEY, "r", pack_run(made), 1)
        worker = asyncio.create_task(operator.work(0))
        for plural in PLURALS:
            operator.queue.add(KEY)
            await asyncio.sleep(0.05)
            assert (api.writes, operator.health.is_synced) == ([], False)
            operator.sight.list_whole(place, plural)
        assert operator.health.is_synced is (len(namespaces) < 2)
        for plural in PLURALS if namespaces else ():
            operator.sight.list_whole("other", plural)
        assert operator.health.is_synced
        for _ in range(100):
            await asyncio.sleep(0.05)
            if "orbitruns" in api.writes:
                break
        worker.cancel()
        assert api.writes[2:] == ["jobs", "events", "orbitruns"]

    asyncio.run(work())


def test_what_lost_its_run_is_looked_at_as_well_once_all_was_listed() -> None:
    operator = Operator(Settings(), Answering())
    operator.cache.put_job(("team", "orphan"), Child("r", JobFacts("orphan-a1", "j", 1)), 1)
    for plural in PLURALS:
        operator.sight.list_whole(EVERYWHERE, plural)
    assert len(operator.queue) == 1


def test_a_run_that_went_while_nothing_could_be_seen_leaves_no_numbers() -> None:
    async def work() -> None:
        operator = Operator(Settings(runtime_image="orbit-runtime:1", namespaces=("team",)), Answering())
        for plural in PLURALS:
            operator.sight.list_whole("team", plural)
        operator.metrics.runs[KEY] = b""
        operator.sight.refuse("team", "pods", "no")
        assert (operator.health.lost, operator.health.is_synced) == (("team",), True)
        operator.queue.add(KEY)
        worker = asyncio.create_task(operator.work(0))
        await asyncio.sleep(0.05)
        assert operator.metrics.runs, "nobody knows"
        operator.sight.list_whole("team", "pods")
        assert operator.health.lost == ()
        await asyncio.sleep(0.05)
        worker.cancel()
        assert operator.metrics.runs == {}

    asyncio.run(work())


class Late(Answering):
    """Knows a run whose pod was placed an hour ago."""

    async def call(self, verb: str, kind: Kind, *place: Any, **options: Any) -> Body:
        if verb == "DELETE":
            self.writes.append(f"delete {kind.plural}")
            return {}
        if verb != "GET":
            return await super().call(verb, kind, *place, **options)
        found: dict[str, Body] = {"orbitruns": LATE_RUN, "jobs": {"items": [LATE_JOB]}, "pods": {"items": [LATE_POD]}}
        return found.get(kind.plural, {"items": []})


LONG_AGO = format_time(time.time() - 3600)
LABELS = {"orbitrl.dev/run-name": "adder", "orbitrl.dev/run-uid": "r", "orbitrl.dev/attempt": "1"}
LATE_RUN: dict[str, Any] = {
    "metadata": {**HEAD, "creationTimestamp": LONG_AGO},
    "spec": {**SPEC, "lifecycle": {"startupDeadlineSeconds": 600}},
}
LATE_JOB: dict[str, Any] = {
    "metadata": {**HEAD, "name": "adder-a1", "uid": "j", "labels": LABELS, "creationTimestamp": LONG_AGO},
    "status": {"active": 1},
}
LATE_POD: dict[str, Any] = {
    "metadata": {
        **HEAD,
        "name": "adder-a1-x",
        "uid": "p",
        "labels": LABELS,
        "creationTimestamp": LONG_AGO,
        "ownerReferences": [{"kind": "Job", "uid": "j"}],
    },
    "spec": {"nodeName": "n0"},
    "status": {
        "phase": "Running",
        "podIP": "127.0.0.1",
        "conditions": [
            {"type": name, "status": "True", "lastTransitionTime": LONG_AGO} for name in ("PodScheduled", "Ready")
        ],
        "containerStatuses": [{"name": "run", "state": {"running": {"startedAt": LONG_AGO}}}],
    },
}


@pytest.mark.parametrize(("phase", "stops"), [("Starting", True), ("Running", False), (None, True)])
def test_a_pod_is_asked_before_it_is_stopped_for_being_late(phase: str | None, stops: bool) -> None:
    """With thousands of pods its last word is minutes old; it may train by now."""
    api = Late()
    operator = Operator(Settings(runtime_image="orbit-runtime:1"), api)
    operator.cache.runs.put(KEY, "r", pack_run(LATE_RUN), 1)
    put_child(operator.cache, "Job", LATE_JOB)
    put_child(operator.cache, "Pod", LATE_POD)
    progress = operator.parts.observer.progress
    progress[KEY] = Progress(time.time() - 3000, "p", "Starting", 0)
    asked = []

    async def ask(key: Key) -> None:
        asked.append(key)
        if phase is not None:
            progress[key] = Progress(time.time(), "p", phase, 0)

    asyncio.run(reconcile(KEY, replace(operator.parts, ask=ask)))
    assert asked == [KEY]
    assert ("delete pods" in api.writes) is stops


def test_what_kopf_looks_for_once_is_waited_for() -> None:
    """The group of a new CRD is served a little before it is listed."""

    class Young(Answering):
        told = 0

        async def call(self, verb: str, kind: Kind, *place: Any, **_: Any) -> Body:
            if place[0] != "/apis":
                return {}
            self.told += 1
            return {"groups": [{"name": "batch"}, {"name": "orbitrl.dev"}][: self.told]}

    api = Young()
    asyncio.run(wait_for_crd(api, asyncio.Event()))
    assert api.told == 2
