"""What the operator knows of itself: its cache, its health, its metrics, when it writes, and the CRD it finds."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

pytest.importorskip("kopf", reason="the operator's packages are not installed (extra `operator`)")
from prometheus_client.parser import text_string_to_metric_families

from orbit_operator.api import JOBS, PODS, RUNS, ApiError, Kind
from orbit_operator.cache import Cache, Child, ObjectIndex, RawRun
from orbit_operator.crd_check import describe_problem, drop_fields, find_differences, find_served, missing_fields
from orbit_operator.facts import JobFacts, RecordedStatus
from orbit_operator.handlers import build_kopf_settings
from orbit_operator.health import LONGEST_PASS_SECONDS, STALLED_SECONDS, Health
from orbit_operator.intake import drop_pod, put_child, put_run
from orbit_operator.metrics import RUN_SERIES, Metrics, build_text
from orbit_operator.reconcile import write_due
from orbit_operator.resync import Resync
from orbit_operator.settings import Settings
from orbit_operator.timestamps import format_time
from orbit_runtime.spec.crd import build_schema

KEY = ("team", "adder")


def test_the_cache_keeps_what_is_newer_and_what_is_deleted_stays_deleted() -> None:
    shelf: ObjectIndex[str] = ObjectIndex()
    shelf.put(KEY, "a", "new", 7)
    shelf.put(KEY, "a", "old", 6)
    shelf.put(KEY, "b", "other", 1)
    assert shelf.of(KEY) == ("new", "other")
    assert shelf.drop("a") == KEY
    shelf.put(KEY, "a", "late", 9)
    assert shelf.of(KEY) == ("other",)
    assert shelf.drop("a") is None
    shelf.drop("b")
    assert (shelf.keys_now(), len(shelf)) == ([], 0)


def test_of_two_runs_of_one_name_the_newer_counts() -> None:
    cache = Cache()
    cache.runs.put(KEY, "old", RawRun("old", b"", "5"), 5)
    cache.runs.put(KEY, "new", RawRun("new", b"", "9"), 9)
    run = cache.run(KEY)
    assert run is not None
    assert run.uid == "new"


def test_how_a_pod_ended_outlives_the_pod() -> None:
    cache = Cache()
    labels = {"orbitrl.dev/run-name": "adder", "orbitrl.dev/run-uid": "r", "orbitrl.dev/attempt": "1"}
    body: dict[str, Any] = {
        "metadata": {"name": "p", "namespace": "team", "uid": "u", "labels": labels, "resourceVersion": "3"},
        "status": {"phase": "Running"},
    }
    put_child(cache, "Pod", body)
    drop_pod(cache, {**body, "status": {"phase": "Failed"}})
    assert [each.facts.phase for each in cache.pods.of(KEY)] == ["Failed"]
    body["metadata"] = {**body["metadata"], "uid": "v"}
    put_child(cache, "Pod", body)
    drop_pod(cache, body)
    assert [each.facts.uid for each in cache.pods.of(KEY)] == ["u"]
    put_run(cache, {"metadata": {"name": "adder", "namespace": "team", "uid": "r", "resourceVersion": "4"}})
    assert cache.run(KEY) is not None


class Listed:
    """An API that only lists: uid and version, by kind. Hand-written; the real one is in the cluster tests."""

    def __init__(self, **kinds: Mapping[str, int]) -> None:
        self.kinds = kinds

    async def list(
        self, kind: Kind, namespace: str | None, query: Mapping[str, str], *, metadata_only: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        assert metadata_only
        for uid, version in self.kinds.get(kind.plural, {}).items():
            yield {"metadata": {"uid": uid, "resourceVersion": str(version)}}


def check_twice(cache: Cache, first: Listed, second: Listed) -> tuple[Health, list[tuple[str, str]]]:
    health, changed = Health(clock=lambda: 100.0), list[tuple[str, str]]()
    resync = Resync(first, cache, health, (None,), changed.append)  # type: ignore[arg-type]
    asyncio.run(resync.check())
    resync._api = second  # type: ignore[assignment]
    asyncio.run(resync.check())
    return health, changed


def filled() -> Cache:
    cache = Cache()
    cache.runs.put(KEY, "r", RawRun("r", b"", "5"), 5)
    cache.jobs.put(KEY, "j", Child("r", JobFacts("adder-a1", "j", 1)), 6)
    return cache


def test_watching_that_keeps_up_is_well() -> None:
    there = Listed(orbitruns={"r": 5}, jobs={"j": 6})
    assert check_twice(filled(), there, there)[0].stalled_since is None


@pytest.mark.parametrize(
    ("runs", "as_believed"), [({"r": 5}, True), ({"r": 6}, False), ({}, False), ({"r": 5, "s": 1}, False)]
)
def test_a_check_tells_whether_a_second_look_is_due(runs: dict[str, int], as_believed: bool) -> None:
    api = Listed(orbitruns=runs, jobs={"j": 6})
    resync = Resync(api, filled(), Health(), (None,), lambda _: None)  # type: ignore[arg-type]
    assert asyncio.run(resync.check()) is as_believed

    assert (RUNS.plural, JOBS.plural, PODS.plural) == ("orbitruns", "jobs", "pods")


def test_news_that_two_checks_have_seen_and_watching_has_not_are_a_stall() -> None:
    behind = Listed(orbitruns={"r": 9}, jobs={"j": 6})
    assert check_twice(filled(), behind, behind)[0].stalled_since == 100.0
    even = Listed(orbitruns={"r": 5}, jobs={"j": 6})
    assert check_twice(filled(), even, behind)[0].stalled_since is None
    assert check_twice(filled(), behind, even)[0].stalled_since is None


def test_an_object_nobody_told_us_about_is_a_stall_as_well() -> None:
    more = Listed(orbitruns={"r": 5, "s": 7}, jobs={"j": 6})
    assert check_twice(filled(), more, more)[0].stalled_since == 100.0


class PartlyListed(Listed):
    """Refuses one kind in one namespace."""

    async def list(
        self, kind: Kind, namespace: str | None, query: Mapping[str, str], *, metadata_only: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        if (namespace, kind) == ("team", JOBS):
            raise ApiError(403, "Forbidden", "jobs is forbidden")
        async for item in super().list(kind, namespace, query, metadata_only=metadata_only):
            yield item


def test_of_what_may_not_be_listed_nothing_is_concluded_and_the_rest_is() -> None:
    cache, changed = filled(), list[tuple[str, str]]()
    api = PartlyListed(orbitruns={})
    resync = Resync(api, cache, Health(), ("other", "team"), changed.append)  # type: ignore[arg-type]
    for _ in range(2):
        asyncio.run(resync.check())
    assert len(cache.jobs.of(KEY)) == 1
    assert (cache.run(KEY), changed) == (None, [KEY])


def test_what_two_checks_miss_is_gone() -> None:
    cache, less = filled(), Listed(orbitruns={"r": 5})
    _, changed = check_twice(cache, less, less)
    assert (cache.jobs.of(KEY), changed) == ((), [KEY])
    cache = filled()
    check_twice(cache, less, Listed(orbitruns={"r": 5}, jobs={"j": 6}))
    assert len(cache.jobs.of(KEY)) == 1


def test_the_process_is_unwell_when_watching_stalls_or_a_pass_never_ends() -> None:
    now = [1000.0]
    health = Health(clock=lambda: now[0])
    assert health.find_stall() == ""
    health.stalled_since = 1000.0
    assert health.find_stall() == ""
    now[0] += STALLED_SECONDS + 1
    assert "behind" in health.find_stall()
    health.stalled_since = None
    health.passes[1] = now[0]
    now[0] += LONGEST_PASS_SECONDS + 1
    assert "pass" in health.find_stall()
    assert "Lease" in health.find_unready()


STATUS: dict[str, Any] = {
    "phase": "Running",
    "reason": "Running",
    "whoActs": "None",
    "step": 3,
    "lastReportTime": format_time(100),
    "attempts": [{"number": 1, "step": 3, "scheduleTime": format_time(50)}],
    "gpuSeconds": {"useful": 10, "lost": 0, "waiting": 1},
    "conditions": [{"type": "Progressing", "status": "True"}],
}


@pytest.mark.parametrize(
    ("change", "now", "due"),
    [
        ({}, 110.0, None),
        ({"phase": "Failed"}, 110.0, 0.0),
        ({"attempts": [{"number": 1, "node": "n0"}]}, 110.0, 0.0),
        ({"gpuSeconds": {"useful": 90}}, 110.0, None),
        ({"step": 4, "lastReportTime": format_time(110)}, 110.0, 20.0),
        ({"step": 4, "lastReportTime": format_time(110)}, 130.0, 0.0),
    ],
)
def test_a_change_is_written_at_once_and_progress_now_and_then(
    change: dict[str, Any], now: float, due: float | None
) -> None:
    assert write_due(RecordedStatus(raw=STATUS), {**STATUS, **change}, now, 30.0) == due


def test_the_first_report_is_written_at_once() -> None:
    before = {name: value for name, value in STATUS.items() if name not in ("lastReportTime", "step")}
    assert write_due(RecordedStatus(raw=before), STATUS, 101.0, 30.0) == 0.0


def test_a_scrape_tells_of_every_run_and_forgets_those_that_are_gone() -> None:
    metrics = Metrics()
    spec = {"model": {"uri": "hf://a/b", "precision": "INT4"}, "adapter": {"type": "LoRA"}}
    ended = {"time": format_time(7), "budget": "Infra", "reason": "NodeLost", "whoActs": "Cluster"}
    status = {**STATUS, "infraRestarts": 2, "attempts": [{"number": 1, "ending": ended}, *STATUS["attempts"]]}
    metrics.runs[KEY] = build_text(*KEY, spec, status, 8)
    text = b"".join(metrics.render()).decode()
    where = 'namespace="team"'
    for line in (
        f'orbit_run_info{{adapter="LoRA",model="hf://a/b",{where},node="",precision="INT4",queue="",run="adder"}} 1.0',
        'orbit_run_phase{namespace="team",owner="None",phase="Running",reason="Running",run="adder"} 1.0',
        'orbit_run_attempts_total{class="infra",namespace="team",run="adder"} 2.0',
        'orbit_run_attempts_total{class="user",namespace="team",run="adder"} 0.0',
        'orbit_run_gpus{namespace="team",run="adder"} 8.0',
        f'end_timestamp_seconds{{class="infra",{where},owner="Cluster",reason="NodeLost",run="adder"}} 7.0',
        'orbit_run_status_condition{condition="Progressing",namespace="team",run="adder",status="False"} 0.0',
    ):
        assert line in text, line
    assert "orbit_run_finished_timestamp_seconds{" not in text
    del metrics.runs[KEY]
    assert 'run="adder"' not in b"".join(metrics.render()).decode()


def test_a_crd_of_this_version_lacks_nothing_and_an_older_one_says_what() -> None:
    own = build_schema()
    document = {
        "components": {"schemas": {"x": {"x-kubernetes-group-version-kind": [{"kind": "OrbitRun"}], **own}, "y": {}}}
    }
    served = find_served(document)
    assert served is not None
    assert missing_fields(own, served) == []
    properties = own["properties"]
    spec = {name: value for name, value in properties["spec"]["properties"].items() if name != "placement"}
    older = {**own, "properties": {**properties, "spec": {**properties["spec"], "properties": spec}}}
    assert missing_fields(own, older) == ["spec.placement"]
    assert find_served({}) is None


def at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """The schema of a field, as `spec.data.prompts[].uri`."""
    for name in path.replace("[]", ".[]").split("."):
        schema = schema["items"] if name == "[]" else schema["properties"][name]
    return schema


def add_newer_field(schema: dict[str, Any]) -> None:
    storage = at(schema, "spec.storage")
    storage["properties"]["region"] = {"type": "string"}
    storage["default"]["region"] = "eu"
    storage["x-kubernetes-validations"].append({"rule": "self.region != ''"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda own: None, []),
        (lambda own: at(own, "spec.placement").update(description="told otherwise"), []),
        (lambda own: at(own, "spec.placement.gpus").update(maximum=8),
         ["it has another maximum for spec.placement.gpus"]),
        (lambda own: at(own, "spec.placement.gpus").update(default=4),
         ["it has another default for spec.placement.gpus"]),
        (lambda own: at(own, "spec.placement.egress[].cidr").pop("pattern"),
         ["it has another pattern for spec.placement.egress[].cidr"]),
        (lambda own: at(own, "spec.adapter.type")["enum"].remove("OFT"), ["it knows no OFT for spec.adapter.type"]),
        (lambda own: at(own, "spec.adapter.type").pop("enum"), ["it takes any value for spec.adapter.type"]),
        (lambda own: at(own, "spec.adapter.type")["enum"].append("DoRA"), []),
        (lambda own: at(own, "spec")["required"].remove("model"), ["it wants other fields of spec"]),
        (lambda own: at(own, "spec.storage")["x-kubernetes-validations"].pop(),
         ["it has other rules for spec.storage"]),
        (lambda own: own["x-kubernetes-validations"].append({"rule": "false"}), ["it has other rules for the object"]),
        (add_newer_field, []),
        (lambda own: at(own, "spec.storage")["properties"].pop("deletionPolicy"), []),
        (lambda own: at(own, "spec.placement.nodeSelector")["additionalProperties"].update(maxLength=9),
         ["it has another maxLength for spec.placement.nodeSelector.*"]),
    ],
)  # fmt: skip
def test_a_crd_that_differs_says_where_unless_it_only_has_more(
    change: Callable[[dict[str, Any]], Any], said: list[str]
) -> None:
    served = copy.deepcopy(build_schema())
    change(served)
    assert find_differences(build_schema(), served) == said


def test_no_rule_is_missed_where_an_api_server_publishes_none() -> None:
    def strip(schema: Any) -> Any:
        if isinstance(schema, list):
            return [strip(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        return {name: strip(each) for name, each in schema.items() if name != "x-kubernetes-validations"}

    assert find_differences(build_schema(), strip(build_schema())) == []


def test_what_is_wrong_with_a_crd_takes_one_line() -> None:
    assert describe_problem((), ()) == ""
    assert describe_problem((), ["it has other rules for spec"]) == (
        "the installed CRD is not the operator's: it has other rules for spec; apply crds/ of this version"
    )
    assert describe_problem(tuple("abcde"), ["it has other rules for spec"]) == (
        "the installed CRD is older than the operator: it lacks a, it lacks b, it lacks c, it lacks d, it lacks e …; "
        "apply crds/ of this version"
    )


def test_fields_that_the_crd_lacks_are_left_out_of_a_status() -> None:
    ending = {"reason": "EngineDied", "whoActs": "Cluster"}
    status = {"phase": "Failed", "whoActs": "Cluster", "attempts": [{"number": 1, "ending": ending}, {"number": 2}]}
    lacks = ("spec.placement", "status.whoActs", "status.attempts[].ending.whoActs", "status.notThere", "status.a.b")
    assert drop_fields(status, lacks) == {
        "phase": "Failed",
        "attempts": [{"number": 1, "ending": {"reason": "EngineDied"}}, {"number": 2}],
    }
    assert ending["whoActs"] == "Cluster", "what it was made from stays whole"
    assert drop_fields(status, ()) == status


def test_kopf_neither_peers_nor_scans_nor_stores_anything() -> None:
    chosen = build_kopf_settings(Settings())
    assert chosen.peering.standalone
    assert chosen.scanning.disabled
    assert not chosen.posting.enabled
    assert chosen.process.ultimate_exiting_timeout == 25
    assert max(chosen.networking.error_backoffs) <= 2.0  # type: ignore[arg-type]
    assert chosen.watching.client_timeout is not None


def test_every_series_of_a_run_is_read_by_prometheus_own_parser_whatever_its_labels_hold() -> None:
    metrics = Metrics()
    queue = 'a "quoted" \\ name\nwith two lines'
    status = {"phase": "Running", "reason": "Running", "attempt": 3}
    for name in ("one", "two"):
        metrics.runs["team", name] = build_text("team", name, {"lifecycle": {"queueName": queue}}, status, 8)
    families = {family.name: family for family in text_string_to_metric_families(b"".join(metrics.render()).decode())}
    assert {f"orbit_run_{name}" for name in RUN_SERIES} <= {*families}
    info = families["orbit_run_info"].samples
    assert [(each.labels["run"], each.labels["queue"], each.value) for each in info] == [
        ("one", queue, 1.0),
        ("two", queue, 1.0),
    ]
    assert [each.value for each in families["orbit_run_attempt"].samples] == [3.0, 3.0]
