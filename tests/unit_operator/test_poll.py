"""Pods that hang, lie and flood, as real HTTP servers on the loopback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest

pytest.importorskip("kopf", reason="the operator's packages are not installed (extra `operator`)")
from aiohttp import ClientSession, ClientTimeout, web

from orbit_operator import poll
from orbit_operator.cache import Cache, Child, Key, RawRun
from orbit_operator.facts import ContainerEnd, JobFacts, PodFacts, Progress
from orbit_operator.metrics import Metrics
from orbit_operator.observe import Observer
from orbit_operator.poll import LARGEST_ANSWER, Poller, read_progress

KEY: Key = ("team", "adder")
GOOD: dict[str, Any] = {
    "run": "adder",
    "phase": "Running",
    "step": 3,
    "total": 60,
    "reward": 0.5,
    "parity": 1e-6,
    "parity_limit": 1e-4,
    "policy_version": 3,
    "adapter_digest": "sha256:ab",
    "last_checkpoint": "checkpoints/step-000003",
    "last_checkpoint_step": 3,
    "best": {"step": 2, "evaluation": "held-out", "value": 0.75},
    "tokens_per_second": 100.5,
    "eta_seconds": 12.5,
    "resumed_from_step": 2,
    "execution": 2,
    "live": True,
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serve(handler: Handler) -> AsyncIterator[int]:
    """The port where every pod of a test answers."""
    app = web.Application()
    app.router.add_get("/status", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def ask(handler: Handler, known: Progress | None = None) -> tuple[dict[Key, Progress], str, float]:
    """One question to one pod: what is known then, the outcome that was counted, and how long it took."""

    async def work() -> tuple[dict[Key, Progress], str, float]:
        cache, metrics = Cache(), Metrics()
        cache.runs.put(KEY, "r", RawRun("r", b"{}", "1"), 1)
        pod = PodFacts("adder-a1-x", "p", 1, ip="127.0.0.1", started=1.0, phase="Running")
        cache.pods.put(KEY, "p", Child("r", pod), 1)
        progress = {} if known is None else {KEY: known}
        async with serve(handler) as port, ClientSession(timeout=ClientTimeout(total=0.5)) as session:
            poller = Poller(cache, progress, lambda _: None, metrics, connections=2, port_of=lambda _: port)
            poller._session = session
            began = time.monotonic()
            await poller.round()
            took = time.monotonic() - began
        outcomes = [s.labels["outcome"] for m in metrics.polls.collect() for s in m.samples if s.value]
        return progress, outcomes[-1], took

    return asyncio.run(work())


def test_an_answer_is_taken_over_whole() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response(GOOD)

    progress, outcome, _ = ask(handler)
    heard = progress[KEY]
    assert outcome == "answered"
    assert (heard.step, heard.total, heard.reward, heard.checkpoint_step) == (3, 60, 0.5, 3)
    assert (heard.pod_uid, heard.phase, heard.execution, heard.resumed_from) == ("p", "Running", 2, 2)


def test_a_pod_that_hangs_costs_one_time_limit() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3)
        return web.json_response(GOOD)

    progress, outcome, took = ask(handler)
    assert (progress, outcome) == ({}, "timeout")
    assert took < 1.5


def test_a_pod_that_floods_is_cut_off() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(64):
            await answer.write(b" " * LARGEST_ANSWER)
        return answer

    assert ask(handler)[:2] == ({}, "flooded")


@pytest.mark.parametrize("body", ["<html>", "[1, 2]", "null", '{"run": "another"}', '{"step": 3}'])
def test_what_is_no_status_of_this_run_is_refused(body: str) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(text=body)

    assert ask(handler)[:2] == ({}, "refused")


def test_a_redirect_is_not_followed() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"})

    assert ask(handler)[:2] == ({}, "refused")


def test_a_pod_never_unlearns() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response({**GOOD, "step": 2})

    known = Progress(1.0, "p", "Running", 5)
    assert ask(handler, known)[0] == {KEY: known}
    assert ask(handler, Progress(1.0, "former", "Running", 5))[0][KEY].step == 2


def test_only_the_newest_pod_is_asked() -> None:
    cache = Cache()
    cache.runs.put(KEY, "r", RawRun("r", b"{}", "1"), 1)
    left = PodFacts("adder-a1-x", "p1", 1, ip="127.0.0.1", created=1.0, started=1.0, phase="Running")
    cache.pods.put(KEY, "p1", Child("r", left), 1)
    cache.pods.put(KEY, "p2", Child("r", PodFacts("adder-a2-x", "p2", 2, created=2.0)), 2)
    poller = Poller(cache, {}, lambda _: None, Metrics(), connections=2, port_of=lambda _: 1)
    assert asyncio.run(poller.round()) == 0, "one on a lost node may still answer, and speaks for nobody"


@pytest.mark.parametrize("made", [1.0, 2.0], ids=["in-the-same-second", "later"])
def test_a_pod_of_ranks_is_never_asked_in_place_of_the_runs_own(made: float) -> None:
    """It has the run's labels, and listens elsewhere: the run was silent until it ended."""
    cache, asked = Cache(), list[str]()
    cache.runs.put(KEY, "r", RawRun("r", b"{}", "1"), 1)
    own = PodFacts("adder-a1-x", "p", 1, ip="127.0.0.1", created=1.0, started=1.0, phase="Running")
    cache.pods.put(KEY, "p", Child("r", own), 1)
    cache.pods.put(KEY, "q", Child("r", replace(own, name="ranks-adder-a1-x", uid="q", attempt=0, created=made)), 2)

    class Noting(Poller):
        async def _ask(self, key: Key, pod: PodFacts, port: int) -> None:
            asked.append(pod.name)

    poller = Noting(cache, {}, lambda _: None, Metrics(), connections=2, port_of=lambda _: 1)
    asyncio.run(poller.round())
    assert asked == ["adder-a1-x"]


def test_pods_are_asked_few_at_a_time_and_none_that_has_ended_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poll, "POLLS_AT_ONCE", 2)
    cache, times = Cache(), []
    for index in range(6):
        key = ("team", f"run-{index}")
        cache.runs.put(key, f"r{index}", RawRun(f"r{index}", b"{}", "1"), 1)
        pod = PodFacts(f"run-{index}-a1-x", f"p{index}", 1, ip="127.0.0.1", started=1.0, phase="Running")
        cache.pods.put(key, pod.uid, Child(f"r{index}", pod), 1)

    async def handler(_: web.Request) -> web.StreamResponse:
        times.append(time.monotonic())
        cache.pods.drop("p5")
        await asyncio.sleep(0.6)
        return web.json_response(GOOD)

    async def work() -> int:
        async with serve(handler) as port, ClientSession() as session:
            poller = Poller(cache, {}, lambda _: None, Metrics(), connections=16, port_of=lambda _: port)
            poller._session = session
            return await poller.round()

    assert asyncio.run(work()) == len(times) == 5, "the last one was gone before its turn came"
    assert times[4] - times[0] > 0.35, "two, then two, then one: no faster than the limit"
    assert times[4] - times[0] < 1.2, "a slow answer holds nobody up"


def test_a_pod_that_has_just_started_need_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 5,000 pods a round takes 500 s, and one that comes just after its beginning waited for two of them."""
    monkeypatch.setattr(poll, "POLLS_AT_ONCE", 1)
    monkeypatch.setattr(poll, "POLLS_PER_SECOND", 20.0)
    cache, told = Cache(), list[str]()

    def start(name: str) -> None:
        cache.runs.put(("team", name), name, RawRun(name, b"{}", "1"), 1)
        pod = PodFacts(f"{name}-a1-x", f"p-{name}", 1, ip="127.0.0.1", started=1.0, phase="Running")
        cache.pods.put(("team", name), pod.uid, Child(name, pod), 1)

    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response(GOOD)

    async def work() -> list[int]:
        async with serve(handler) as port, ClientSession() as session:

            def port_of(key: Key) -> int:
                told.append(key[1])
                if len(told) == 2:
                    start("new")
                    poller.ask_first(("team", "new"))
                    poller.ask_first(("team", "run-3"))
                    poller.ask_first(("team", "run-3"))
                    poller.ask_first(("team", "nobody"))
                return port

            poller = Poller(cache, {}, lambda _: None, Metrics(), connections=16, port_of=port_of)
            poller._session = session
            return [await poller.round(), await poller.round()]

    for index in range(4):
        start(f"run-{index}")
    assert asyncio.run(work()) == [5, 5]
    assert told[:5] == ["run-0", "run-1", "new", "run-2", "run-3"], "each once"
    assert told[5:] == told[:5], "who was not asked for longest"


def test_pods_that_change_again_and_again_keep_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poll, "POLLS_AT_ONCE", 1000)
    cache, told = Cache(), list[str]()
    for index in range(30):
        key = ("team", f"run-{index}")
        cache.runs.put(key, f"r{index}", RawRun(f"r{index}", b"{}", "1"), 1)
        pod = PodFacts(f"run-{index}-a1-x", f"p{index}", 1, ip="127.0.0.1", started=1.0, phase="Running")
        cache.pods.put(key, pod.uid, Child(f"r{index}", pod), 1)

    def port_of(key: Key) -> None:
        told.append(key[1])
        for index in range(3):
            poller.ask_first(("team", f"run-{index}"))

    poller = Poller(cache, {}, lambda _: None, Metrics(), connections=16, port_of=port_of)
    asyncio.run(poller.round())
    assert set(told) == {f"run-{index}" for index in range(30)}
    assert len(told) < 65, "and the round has an end"


def test_last_words_stay_when_the_pod_is_deleted() -> None:
    class NoNodes:
        async def get(self, *_: object) -> None:
            return None

    cache = Cache()
    body = orjson.dumps({"metadata": {"namespace": "team", "name": "adder", "uid": "r"}, "spec": {}})
    cache.runs.put(KEY, "r", RawRun("r", body, "1"), 1)
    observer = Observer(NoNodes(), cache)  # type: ignore[arg-type]
    observer.progress[KEY] = Progress(10.0, "p", "Running", 59)
    words = ContainerEnd(0, message=orjson.dumps({**GOOD, "step": 60}).decode(), finished=11.0)
    pod = PodFacts("adder-a1-x", "p", 1, phase="Succeeded", end=words)

    async def look() -> Progress | None:
        seen = await observer.look(KEY, 12.0)
        assert seen is not None
        return seen[2].progress

    cache.pods.put(KEY, "p", Child("r", pod), 1)
    said = asyncio.run(look())
    assert said is not None
    assert said.step == 60
    observer.forget(KEY)
    assert observer.progress == {}
    observer.progress[KEY] = Progress(10.0, "p", "Running", 59)
    asyncio.run(look())
    assert observer.progress[KEY].step == 60


def test_the_node_of_a_pod_that_ended_is_asked_for_until_its_attempt_is_judged() -> None:
    asked = []

    class Nodes:
        async def get(self, *path: object) -> None:
            asked.append(path[-1])

    def look(status: dict[str, Any]) -> None:
        cache = Cache()
        head = {"namespace": "team", "name": "adder", "uid": "r"}
        cache.runs.put(KEY, "r", RawRun("r", orjson.dumps({"metadata": head, "spec": {}, "status": status}), "1"), 1)
        ended = ContainerEnd(1, finished=3.0)
        for number in (1, 2):
            pod = PodFacts(f"adder-a{number}-x", f"p{number}", number, node=f"n{number}", started=2.0, phase="Failed")
            cache.pods.put(KEY, pod.uid, Child("r", replace(pod, end=ended)), 1)
        asyncio.run(Observer(Nodes(), cache).look(KEY, 12.0))  # type: ignore[arg-type]

    look({})
    assert asked == ["n1", "n2"]
    ending = {"result": "Failed", "reason": "Error", "whoActs": "User", "budget": "User", "exitCode": 1}
    look({"attempts": [{"number": 1, "jobUID": "j", "ending": ending}]})
    assert asked == ["n1", "n2", "n2"]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("step", -1, 0),
        ("step", "7", 0),
        ("step", True, 0),
        ("step", 10**30, 0),
        ("reward", "NaN", None),
        ("reward", float("nan"), None),
        ("reward", float("inf"), None),
        ("reward", 10**400, None),
        ("reward", [1], None),
        ("eta_seconds", -5, None),
        ("adapter_digest", "x" * 999, "x" * 128),
        ("phase", {"a": 1}, ""),
    ],
)
def test_a_value_that_cannot_be_true_is_left_out(field: str, value: Any, expected: Any) -> None:
    heard = read_progress({**GOOD, field: value}, "adder", "p", 1.0)
    assert heard is not None
    assert getattr(heard, field) == expected


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        (GOOD["best"], (2, "held-out", 0.75)),
        ({"step": 0, "value": 10**400}, (0, None, None)),
        ([2], (None, None, None)),
        (None, (None, None, None)),
    ],
)
def test_the_best_adapter_is_read(best: Any, expected: tuple[Any, ...]) -> None:
    heard = read_progress({**GOOD, "best": best}, "adder", "p", 1.0)
    assert heard is not None
    assert (heard.best_step, heard.best_evaluation, heard.best_value) == expected


def test_the_limits_are_what_is_documented() -> None:
    assert (poll.ANSWER_SECONDS, poll.LARGEST_ANSWER, poll.POLLS_PER_SECOND) == (3.0, 65536, 10.0)


def test_what_holds_a_pod_that_a_queue_gave_room_again_is_asked_for_and_not_what_held_its_predecessor() -> None:
    class Events:
        async def list(self, _kind: object, _namespace: str, query: dict[str, str]) -> AsyncIterator[dict[str, str]]:
            yield {"reason": "FailedMount", "message": query["fieldSelector"]}

    cache = Cache()
    body = orjson.dumps({"metadata": {"namespace": "team", "name": "adder", "uid": "r"}, "spec": {}})
    cache.runs.put(KEY, "r", RawRun("r", body, "1"), 1)
    cache.jobs.put(KEY, "j", Child("r", JobFacts("adder-a1", "j", 1)), 1)
    ended = PodFacts("adder-a1-x", "former", 1, created=1.0, phase="Failed")
    cache.pods.put(KEY, "former", Child("r", ended), 1)
    held = PodFacts("adder-a1-y", "newest", 1, created=2.0, node="n0", scheduled=2.0)
    cache.pods.put(KEY, "newest", Child("r", held), 1)
    seen = asyncio.run(Observer(Events(), cache).look(KEY, 100.0))  # type: ignore[arg-type]
    assert seen is not None
    assert "involvedObject.uid=newest," in seen[2].warning
