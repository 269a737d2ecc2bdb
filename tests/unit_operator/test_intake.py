"""Of what the API server tells, kopf gets stubs of what is news; the session does so over real HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

pytest.importorskip("kopf", reason="the operator's packages are not installed (extra `operator`)")
import kopf
from aiohttp import web

from orbit_operator.cache import Cache, Key, RawRun
from orbit_operator.intake import Intake
from orbit_operator.session import open_session

KEY: Key = ("team", "adder")
LABELS = {"orbitrl.dev/run-name": "adder", "orbitrl.dev/run-uid": "r", "orbitrl.dev/attempt": "1"}


def head(uid: str, version: int, **more: Any) -> dict[str, Any]:
    managed = [{"manager": "kubelet", "fieldsV1": {"f:status": {}}, "time": str(version)}]
    kept = {"namespace": "team", "name": "adder", "uid": uid, "resourceVersion": str(version)}
    return {**kept, "managedFields": managed, **more}


def pod(version: int, phase: str, **status: Any) -> dict[str, Any]:
    metadata = head("p", version, name="adder-a1-x", labels=LABELS)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": {"phase": phase, **status}}


def run(version: int) -> dict[str, Any]:
    return {"apiVersion": "orbitrl.dev/v1alpha1", "kind": "OrbitRun", "metadata": head("r", version), "spec": {}}


def line(event: str, body: Any) -> bytes:
    return orjson.dumps({"type": event, "object": body})


def build_intake(cache: Cache) -> Intake:
    return Intake(cache, lambda key, uid, version: not cache.is_known(uid, version))


def test_a_stub_says_who_it_is_and_whose_and_nothing_else() -> None:
    cache = Cache()
    told = build_intake(cache).take_line(line("ADDED", pod(3, "Pending")))
    assert told is not None
    kept = {"namespace": "team", "name": "adder-a1-x", "uid": "p", "resourceVersion": "3"}
    labels = {"orbitrl.dev/run-name": "adder"}
    assert orjson.loads(told) == {
        "type": "ADDED",
        "object": {"apiVersion": "v1", "kind": "Pod", "metadata": {**kept, "labels": labels}},
    }
    assert [each.facts.phase for each in cache.pods.of(KEY)] == ["Pending"]


def test_an_object_that_says_nothing_new_is_no_news_and_its_version_is_kept() -> None:
    cache, heard = Cache(), list[bool | None]()
    intake = Intake(cache, lambda *_: True, heard.append)
    assert intake.take_line(line("ADDED", pod(3, "Running")))
    assert intake.take_line(line("MODIFIED", pod(4, "Running", qosClass="Guaranteed"))) is None
    assert cache.pods.version("p") == 4
    assert intake.take_line(line("MODIFIED", pod(5, "Failed")))
    assert intake.take_line(line("MODIFIED", pod(4, "Running"))) is None, "what is older"
    assert intake.take_line(line("DELETED", pod(6, "Failed")))
    assert [each.facts.phase for each in cache.pods.of(KEY)] == ["Failed"]
    assert intake.take_line(line("BOOKMARK", {"kind": "Pod"}))
    assert heard == [True, False, True, False, True, None]


def test_a_job_that_is_deleted_is_told_and_forgotten() -> None:
    cache = Cache()
    intake = build_intake(cache)
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": head("j", 3, name="adder-a1", labels=LABELS)}
    assert intake.take_line(line("ADDED", job))
    assert len(cache.jobs.of(KEY)) == 1
    assert intake.take_line(line("DELETED", job))
    assert cache.jobs.of(KEY) == ()


def test_our_own_writes_do_not_come_back_and_what_others_write_does() -> None:
    cache = Cache()
    intake = build_intake(cache)
    assert intake.take_line(line("ADDED", run(3)))
    cache.put_written(KEY, RawRun("r", b"{}", "5"))
    assert intake.take_line(line("MODIFIED", run(4))) is None
    assert intake.take_line(line("MODIFIED", run(5))) is None
    assert intake.take_line(line("MODIFIED", run(6)))
    assert intake.take_line(line("DELETED", run(7)))
    assert cache.run(KEY) is None
    assert not cache.is_known("r", 5)


@pytest.mark.parametrize(
    "text",
    [
        line("BOOKMARK", {"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": "9"}}),
        line("ERROR", {"kind": "Status", "code": 410}),
        line("ADDED", {"kind": "Secret", "metadata": {}}),
        b"{cut",
        b"[]",
        b'{"type":"ADDED"}',
    ],
)
def test_what_is_not_for_us_goes_on_as_it_is(text: bytes) -> None:
    assert build_intake(Cache()).take_line(text) == text


def test_an_object_that_cannot_be_read_is_told_nevertheless(caplog: pytest.LogCaptureFixture) -> None:
    told = build_intake(Cache()).take_line(line("ADDED", pod(3, "Running", conditions=7)))
    assert told is not None
    assert orjson.loads(told)["object"]["metadata"]["uid"] == "p"
    assert "cannot be read" in caplog.text


def test_of_a_list_the_items_are_stubs_and_all_else_stays() -> None:
    intake = build_intake(Cache())
    bare = {name: value for name, value in pod(3, "Running").items() if name not in ("kind", "apiVersion")}
    page = {"kind": "PodList", "metadata": {"resourceVersion": "8", "continue": "more"}, "items": [bare]}
    told = intake.take_list(page)
    assert told["metadata"] == page["metadata"]
    assert [set(item) for item in told["items"]] == [{"apiVersion", "kind", "metadata"}]
    assert intake.take_list(page)["items"] == [], "listed anew, and nothing has changed"
    other = {"kind": "APIResourceList", "resources": []}
    assert intake.take_list(other) is other
    assert intake.take_list([1]) == [1]


def test_the_session_changes_lists_and_watches_however_the_bytes_come() -> None:
    events = line("ADDED", pod(3, "Pending")) + b"\n" + line("MODIFIED", pod(4, "Pending")) + b"\n"
    events += line("MODIFIED", pod(5, "Running")) + b"\n" + line("BOOKMARK", {"kind": "Pod"}) + b"\n"

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") != "true":
            return web.json_response({"kind": "PodList", "metadata": {}, "items": [pod(2, "Pending")]})
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(events), 100):
            await response.write(events[start : start + 100])
            await asyncio.sleep(0)
        return response

    async def work() -> None:
        app = web.Application()
        app.router.add_get("/pods", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server = f"http://127.0.0.1:{runner.addresses[0][1]}"
        opened = open_session(kopf.ConnectionInfo(server=server, token="t"), build_intake(Cache()))
        assert opened.server == server
        async with opened.aiohttp_session as session:
            assert session.headers["Authorization"] == "Bearer t"
            async with session.get(f"{server}/pods") as answer:
                assert [item["metadata"]["uid"] for item in (await answer.json())["items"]] == ["p"]
            async with session.get(f"{server}/pods?watch=true") as answer:
                text = b"".join([chunk async for chunk in answer.content.iter_chunked(2**20)])
        told = [orjson.loads(each) for each in text.splitlines()]
        assert [each["object"].get("metadata", {}).get("resourceVersion") for each in told] == ["5", None]
        assert told[-1]["type"] == "BOOKMARK"
        await runner.cleanup()

    asyncio.run(work())
