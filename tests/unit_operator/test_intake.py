"""Of what the API server tells, kopf gets stubs of what is news; the session does so over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest

pytest.importorskip("kopf", reason="the operator's packages are not installed (extra `operator`)")
import kopf
from aiohttp import web

from orbit_operator.cache import Cache, Key, RawRun
from orbit_operator.intake import Intake
from orbit_operator.namespaces import EVERYWHERE, LONGEST_PAUSE, PLURALS, NamespaceView
from orbit_operator.session import open_session, read_place

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


def build_intake(cache: Cache, changed: Callable[[Key], None] = lambda _: None) -> Intake:
    return Intake(cache, lambda key, uid, version: not cache.is_known(uid, version), changed)


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
    cache, heard, stirred = Cache(), list[bool | None](), list[Key]()
    intake = Intake(cache, lambda *_: True, lambda _: None, stirred.append, heard.append)
    assert intake.take_line(line("ADDED", pod(3, "Running")))
    assert intake.take_line(line("MODIFIED", pod(4, "Running", qosClass="Guaranteed"))) is None
    assert cache.pods.version("p") == 4
    assert intake.take_line(line("MODIFIED", pod(5, "Failed")))
    assert intake.take_line(line("MODIFIED", pod(4, "Running"))) is None, "what is older"
    assert intake.take_line(line("DELETED", pod(6, "Failed")))
    assert [each.facts.phase for each in cache.pods.of(KEY)] == ["Failed"]
    assert intake.take_line(line("BOOKMARK", {"kind": "Pod"}))
    assert heard == [True, False, True, False, True, None]
    assert stirred == [KEY, KEY], "it runs, it has failed: that it is gone need not be asked about"


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


def test_of_a_list_the_news_are_told_at_once_and_all_else_stays() -> None:
    cache = Cache()
    news: list[Key] = []
    intake = build_intake(cache, news.append)
    bare = {name: value for name, value in pod(3, "Running").items() if name not in ("kind", "apiVersion")}
    page = {"kind": "PodList", "metadata": {"resourceVersion": "8", "continue": "more"}, "items": [bare]}
    assert intake.take_list(page) == {**page, "items": []}
    assert (news, len(cache.pods)) == ([KEY], 1)
    assert intake.take_list(page) == {**page, "items": []}
    assert news == [KEY], "listed anew, and nothing has changed"
    intake.take_list({"kind": "OrbitRunList", "items": [run(7)]})
    assert (news, len(cache.runs)) == ([KEY, KEY], 1)
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
        news: list[Key] = []
        intake = build_intake(Cache(), news.append)
        opened = open_session(kopf.ConnectionInfo(server=server, token="t"), intake, NamespaceView())
        assert opened.server == server
        async with opened.aiohttp_session as session:
            assert session.headers["Authorization"] == "Bearer t"
            async with session.get(f"{server}/pods") as answer:
                assert (await answer.json())["items"] == []
                assert news == [KEY]
            async with session.get(f"{server}/pods?watch=true") as answer:
                text = b"".join([chunk async for chunk in answer.content.iter_chunked(2**20)])
        told = [orjson.loads(each) for each in text.splitlines()]
        assert [each["object"].get("metadata", {}).get("resourceVersion") for each in told] == ["5", None]
        assert told[-1]["type"] == "BOOKMARK"
        await runner.cleanup()

    asyncio.run(work())


class PartlyForbidden:
    """An API server with a right to give and take; hand-written, the real one is in the cluster tests."""

    def __init__(self) -> None:
        self.allowed = False
        self.uids = ["p"]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if not self.allowed:
            return web.json_response({"kind": "Status", "message": "pods is forbidden"}, status=403)
        if request.query.get("continue") == "old":
            return web.json_response({"kind": "Status", "reason": "Expired"}, status=410)
        if request.query.get("watch") != "true":
            more = "continue" not in request.query
            page = {"kind": "PodList", "metadata": {"continue": "x"} if more else {}, "items": []}
            return web.json_response({**page, "items": [pod(2, "Pending")] if more else []})
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(line("MODIFIED", pod(5, "Running")) + b"\n")
        return response


def test_where_reading_is_refused_there_is_nothing_and_later_all_is_listed_anew() -> None:
    told: list[tuple[str, bool]] = []
    keys: list[Key] = []
    sight = NamespaceView(lambda *news: told.append(news))
    there = PartlyForbidden()

    async def work() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", there.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server = f"http://127.0.0.1:{runner.addresses[0][1]}"
        path = f"{server}/api/v1/namespaces/team/pods"
        intake = build_intake(Cache(), keys.append)
        opened = open_session(kopf.ConnectionInfo(server=server, token="t"), intake, sight)
        async with opened.aiohttp_session as session:

            async def listed(query: str = "") -> int:
                before = len(keys)
                async with session.get(path + query) as answer:
                    assert answer.status == 200
                    assert (await answer.json())["items"] == []
                return len(keys) - before

            async def watched() -> list[dict[str, Any]]:
                async with session.get(f"{path}?watch=true") as answer:
                    assert answer.status == 200
                    text = b"".join([chunk async for chunk in answer.content.iter_chunked(2**20)])
                return [orjson.loads(each) for each in text.splitlines()]

            assert await listed() == 0
            assert (sight.lost, sight.sees("team"), sight.sees("other")) == (("team",), False, True)
            there.allowed = True
            # Allowed again between list and watch: what the list did not tell must come before what changes.
            (event,) = await watched()
            assert (event["type"], event["object"]["code"]) == ("ERROR", 410)
            assert await listed() == 1
            assert not sight.sees("team"), "there is another page"
            assert await listed("?continue=x") == 0
            assert sight.sees("team")
            assert [each["type"] for each in await watched()] == ["MODIFIED"]
            assert await listed("?continue=old") == 0
            assert (sight.sees("team"), sight.lost, sight.waits) == (False, (), True), "the rest is not known"
            assert [each["object"]["code"] for each in await watched()] == [410]
            assert await listed("?continue=x") == 0
            assert sight.sees("team")
            there.allowed = False
            assert [each["object"]["code"] for each in await watched()] == [410]
            assert not sight.sees("team")
            # What is not of one namespace stays refused: kopf knows what to do.
            async with session.get(f"{server}/api/v1/pods") as answer:
                assert answer.status == 403
                assert (await answer.json())["message"] == "pods is forbidden"
        await runner.cleanup()

    asyncio.run(work())
    assert told == [("team", False), ("team", True), ("team", True), ("team", False)]


def test_a_namespace_is_back_when_each_kind_was_listed_and_is_asked_less_and_less_often() -> None:
    told: list[tuple[str, bool]] = []
    sight = NamespaceView(lambda *news: told.append(news))
    for kind in ("jobs", "pods"):
        sight.refuse("team", kind, "no")
    sight.list_whole("team", "pods")
    assert (sight.sees("team"), sight.misses("team", "jobs"), sight.misses("team", "pods")) == (False, True, False)
    pauses = []
    for _ in range(12):
        pauses.append(sight.pause("team", "jobs"))
        sight.refuse("team", "jobs", "no")
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (1.0, LONGEST_PAUSE)
    sight.list_whole("team", "orbitruns")
    assert not sight.sees("team")
    sight.list_whole("team", "jobs")
    sight.list_whole("team", "jobs")
    assert (sight.lost, told) == ((), [("team", False), ("team", True)])
    sight.refuse("team", "jobs", "it may be listed, and not watched")
    assert sight.pause("team", "jobs") == LONGEST_PAUSE
    sight.list_whole("team", "jobs")
    sight.watch("team", "jobs")
    sight.refuse("team", "jobs", "no")
    assert sight.pause("team", "jobs") == 1.0


def test_nothing_is_in_sight_before_each_kind_was_listed(caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[str, bool]] = []
    caplog.set_level("INFO")
    sight = NamespaceView(lambda *news: told.append(news), ("team", "other"))
    for kind in ("orbitruns", "jobs"):
        sight.list_whole("team", kind)
    assert (sight.sees("team"), sight.misses("team", "pods"), told) == (False, True, [])
    sight.list_whole("team", "pods")
    assert (sight.sees("team"), sight.sees("other"), sight.lost, told) == (True, False, (), [("team", True)])
    assert caplog.text == "", "it was never refused"
    assert sight.waits
    sight.refuse("other", "jobs", "no")
    assert not sight.waits
    for kind in ("jobs", "orbitruns"):
        sight.list_whole("other", kind)
    assert (sight.sees("other"), sight.lost) == (False, ("other",)), "its pods were not listed yet"
    sight.list_whole("other", "pods")
    assert (sight.sees("other"), sight.lost) == (True, ())
    assert told == [("team", True), ("other", False), ("other", True)]
    assert caplog.text.count("can be read again") == 1


def test_the_whole_cluster_is_in_sight_at_once() -> None:
    told: list[tuple[str, bool]] = []
    sight = NamespaceView(lambda *news: told.append(news), (EVERYWHERE,))
    for kind in PLURALS:
        assert not sight.sees("team")
        sight.list_whole(EVERYWHERE, kind)
    assert sight.sees("team")
    assert told == [(EVERYWHERE, True)]


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/apis/batch/v1/namespaces/lab/jobs", ("lab", "jobs")),
        ("/api/v1/namespaces/lab/pods", ("lab", "pods")),
        ("/api/v1/pods", (EVERYWHERE, "pods")),
        ("/apis/orbitrl.dev/v1alpha1/orbitruns", (EVERYWHERE, "orbitruns")),
        ("/apis/batch/v1", None),
        ("/api/v1/namespaces/pods", None),
        ("/api/v1/namespaces/namespaces/pods", ("namespaces", "pods")),
        ("/api/v1/namespaces/lab", None),
        ("/version", None),
    ],
)
def test_a_path_tells_namespace_and_kind(path: str, place: tuple[str, str] | None) -> None:
    assert read_place(path) == place
