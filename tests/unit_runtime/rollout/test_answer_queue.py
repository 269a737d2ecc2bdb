"""What comes of answers that servers send bit by bit: checked, kept, ended early, continued; nothing counts twice.

The servers are fakes (`tests/fakes/fake_servers.py`); a real SGLang keeps the same contract in `tests/engines`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import aclosing
from dataclasses import replace
from itertools import count

import pytest
from fakes.fake_servers import Events, FakeServer, Fault, once
from hypothesis import given, settings
from hypothesis import strategies as st

from orbit_runtime.errors import GateError
from orbit_runtime.rollout.answer_queue import BLOCK_TOKENS, SLACK, PrefixRouter
from orbit_runtime.rollout.requests import sample
from orbit_runtime.types import Completion, Request, Sampling
from tests.unit_runtime.rollout.test_served_engine import Build, adapter, build, check_whole, requests

__all__ = ["build"]
"""The fixture is the same."""


def event(index: int = 0, tokens: int = 3, **change: object) -> dict:
    entries = [[-1.0, 5, None]] * tokens
    meta = {"output_token_logprobs": entries, "finish_reason": {"type": "length"}, "completion_tokens": tokens}
    return {"index": index, "meta_info": {**meta, **change}}


def part(tokens: int, total: int) -> dict:
    return event(tokens=tokens, finish_reason=None, completion_tokens=total)


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (200, Events([event(4)]), "asked for 4 completions, the engine answered one more"),
        (200, Events([event(tokens=0)]), "answered with 0 tokens"),
        (200, Events([event(tokens=4)]), "answered with 4 tokens, 3 were asked for"),
        (200, Events([event(output_token_logprobs=[[float("nan"), 5, None]])]), "log-prob nan"),
        (200, Events([event(output_token_logprobs=[[None, 5, None]])]), "log-prob None"),
        (200, Events([event(output_token_logprobs=[[0.5, 5, None]])]), "log-prob 0.5"),
        (200, Events([event(finish_reason={"type": "tired"})]), "finish reason tired"),
        (200, Events([event(finish_reason={"type": "abort"})]), "early, although nothing aborted it"),
        (200, Events([part(1, 1), part(1, 1)]), "counts 1 tokens of request 0, but told 2: .* came twice"),
        (200, Events([part(1, 1), part(1, 3)]), "counts 3 tokens of request 0, but told 2: some are missing"),
        (200, Events([{}]), "without meta_info"),
        (200, Events(["data: [1, 2]\n\n"]), "no object"),
        (200, b'[{"meta_info": {"outp', "no stream of events"),
        (400, {"error": {"message": "no such thing"}}, "answered with 400.*no such thing"),
        (200, Events([{"error": {"message": "no such thing", "code": 400}}]), "error.*no such thing"),
    ],
)
def test_an_answer_that_does_not_fit_stops_the_run(build: Build, status: int, body: object, says: str) -> None:
    server = FakeServer()
    engine = build(server)
    server.faults.append(once("/generate", status, body))
    with pytest.raises(GateError, match=says):
        list(sample(engine, requests(1, name=None)))
    check_whole(requests(1, name=None), list(sample(engine, requests(1, name=None))))


def recorder(bodies: list[dict]) -> Fault:
    """Keeps what is asked for, and answers nothing itself."""

    def keep(_: FakeServer, path: str, body: dict) -> None:
        if path == "/generate" and body.get("stream"):
            bodies.append(body)

    return keep


def test_an_event_may_hold_any_text(build: Build) -> None:
    """U+2028 and U+0085 stand in JSON as they are; they end a line of text, and no event."""
    server = FakeServer()
    engine = build(server)
    told = json.dumps({**event(), "text": "a\u2028b\u0085c"}, ensure_ascii=False)
    server.faults.append(once("/generate", 200, Events([f"data: {told}\n\n"])))
    (found,) = sample(engine, requests(1, samples=1, name=None))
    assert found.token_ids_T.tolist() == [5, 5, 5], "nothing was asked for again"


HALF = 'data: {"index": 0, "meta_info": {"output_token_log'
LONG = Sampling(max_new_tokens=8)


@pytest.mark.parametrize(
    "body",
    [
        Events([part(2, 2), HALF], whole=False),
        Events([part(2, 2), HALF + "\n\n"]),
        Events([part(2, 2)], whole=False),
        Events([part(2, 2)]),
        Events([part(2, 2), {"error": {"message": "oops", "code": 500}}]),
        Events([part(8, 8)], whole=False),
    ],
)
@pytest.mark.parametrize("incremental", [True, False])
def test_tokens_that_came_before_a_stream_broke_off_stay_and_the_rest_is_asked_for(
    build: Build, body: Events, incremental: bool
) -> None:
    server = FakeServer(incremental=incremental)
    engine = build(server)
    bodies: list[dict] = []
    server.faults += [once("/generate", 200, body), recorder(bodies)]
    (found,) = sample(engine, [Request(0, 0, (100, 7), LONG, None)])
    kept = len(bodies[-1]["input_ids"][0]) - 2
    assert kept == (7 if next(iter(body.events))["meta_info"]["completion_tokens"] == 8 else 2)  # type: ignore[index]
    assert found.token_ids_T.tolist() == [*(5,) * kept, *range(8 - kept)]
    assert found.finish_reason == "length"
    assert bodies[-1]["sampling_params"][0]["max_new_tokens"] == 8 - kept


@pytest.mark.parametrize("kind", ["SGLang", "vLLM"])
def test_a_server_that_sends_a_token_an_hour_is_waited_for_until_the_deadline(build: Build, kind: str) -> None:
    """It says that it computes: slow is not dead. SGLang is told to end the completion and does; vLLM's is given up."""
    server = FakeServer(kind=kind)
    engine = build(server, patience=0.05)
    two = Sampling(max_new_tokens=8)
    first = (
        part(2, 2)
        if kind == "SGLang"
        else {"choices": [{"token_ids": [5, 5], "logprobs": {"token_logprobs": [-1.0, -1.0]}}]}
    )
    last = event(tokens=0, finish_reason={"type": "abort"}, completion_tokens=2)
    path = "/generate" if kind == "SGLang" else "/v1/completions"
    server.faults.append(once(path, 200, Events([first, 1.0 if kind == "SGLang" else 3600.0, last])))
    (found,) = sample(engine, [Request(0, 0, (100, 7), two, None, deadline_seconds=0.4)])
    assert (found.finish_reason, found.token_ids_T.tolist()) == ("deadline", [5, 5])
    assert server.starts == 1
    assert len(server.aborted) == (1 if kind == "SGLang" else 0)
    check_whole(requests(1, name=None), list(sample(engine, requests(1, name=None))))


@pytest.mark.parametrize("kind", ["SGLang", "vLLM"])
def test_an_aborted_completion_keeps_its_tokens_and_goes_on_under_another_version(build: Build, kind: str) -> None:
    server = FakeServer(kind=kind, piece_seconds=0.05, piece_tokens=1, deaf=1)
    engine = build(server)
    engine.load_adapter("policy-v1", adapter(1))
    engine.load_adapter("policy-v2", adapter(2))
    long = Sampling(max_new_tokens=200)
    asked = [Request(number, 0, (100, 7), long, "policy-v1") for number in range(2)]

    async def two() -> list[Completion]:
        engine.submit(asked)
        found = []
        async with aclosing(engine.completions()) as stream:
            asyncio.get_running_loop().call_later(0.4, engine.abort, [1])
            found.append(await anext(stream))
            engine.abort()
            found += [each async for each in stream]
        return found

    second, first = asyncio.run(two())
    assert (second.request_id, first.request_id) == (1, 0)
    for each in (first, second):
        assert each.finish_reason == "abort"
        assert each.token_ids_T.tolist() == [*range(len(each.token_ids_T))]
        assert 0 < len(each.token_ids_T) < 200
        assert set(each.versions_T) == {1}
    engine.unload_adapter("policy-v1")
    server.piece_seconds = 0.0
    count = len(second.token_ids_T)
    rest = replace(asked[1], adapter="policy-v2", so_far=second)
    (whole,) = sample(engine, [rest])
    assert server.served[-1] == [100, 7, *range(count)]
    assert len(whole.token_ids_T) == 200
    assert whole.token_ids_T[:count] == second.token_ids_T
    assert whole.logprobs_T[:count] == second.logprobs_T
    assert whole.versions_T.tolist() == [1] * count + [2] * (200 - count)
    with pytest.raises(GateError, match="has ended"):
        engine.submit([replace(rest, so_far=whole)])


def test_a_deadline_that_a_server_forgets_at_first_is_told_again_at_once(build: Build) -> None:
    """A server forgets an abort for a request that it has not begun."""
    engine = build(FakeServer(piece_tokens=1, piece_seconds=0.01, deaf=1))
    asked = Request(0, 0, (100, 7), Sampling(max_new_tokens=80), None, deadline_seconds=0.02)
    (found,) = sample(engine, [asked])
    assert found.finish_reason == "deadline"


def test_an_abort_ends_what_it_names_alone(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server ends every request whose id begins with what it is told: 1, and 10 to 19."""
    monkeypatch.setattr("orbit_runtime.rollout.answer_queue._NUMBERS", count(1))
    engine = build(FakeServer(piece_tokens=1, piece_seconds=0.05))
    engine.load_adapter("policy-v1", adapter(1))

    async def all_but_one() -> list[Completion]:
        engine.submit(requests(30, samples=1, tokens=20))
        asyncio.get_running_loop().call_later(0.3, engine.abort, [0])
        return [each async for each in engine.completions()]

    found = {each.request_id: each.finish_reason for each in asyncio.run(all_but_one())}
    assert found == {0: "abort"} | dict.fromkeys(range(1, 30), "length")


def test_what_is_aborted_before_a_server_has_room_comes_back_empty_and_costs_no_call(build: Build) -> None:
    server = FakeServer(piece_seconds=0.2)
    engine = build(server, capacity=1)
    asked = [Request(number, 0, (100 + number, 7), LONG, None) for number in range(3)]
    engine.submit(asked)
    engine.abort([1, 2, 77])

    async def all_of_them() -> list[Completion]:
        return [each async for each in engine.completions()]

    found = {each.request_id: each for each in asyncio.run(all_of_them())}
    assert [found[number].finish_reason for number in range(3)] == ["length", "abort", "abort"]
    assert [len(found[number].token_ids_T) for number in range(3)] == [8, 0, 0]
    assert len(server.served) == 1


def test_an_abort_that_races_the_last_token_gives_the_completion_as_it_ended(build: Build) -> None:
    server = FakeServer()
    engine = build(server)
    server.faults.append(once("/generate", 200, Events([part(2, 2), 0.3, event(tokens=1, completion_tokens=3)])))
    engine.submit(requests(1, samples=1, name=None))
    time.sleep(0.15)
    engine.abort([0])

    async def all_of_them() -> list[Completion]:
        return [each async for each in engine.completions()]

    (found,) = asyncio.run(all_of_them())
    assert (found.finish_reason, len(found.token_ids_T)) == ("length", 3)
    engine.abort([0])
    check_whole(requests(1, name=None), list(sample(engine, requests(1, name=None))))


def test_a_version_that_the_plug_in_did_not_apply_stops_the_run(build: Build) -> None:
    server = FakeServer()
    engine = build(server)
    for version in (1, 2):
        engine.load_adapter(f"policy-v{version}", adapter(version))
    for applied, said in (("policy-v1", "policy-v1"), ("", "the base")):
        server.faults.append(once("/generate", 200, Events([event(orbit_adapter=[applied])])))
        with pytest.raises(GateError, match=f"asked for policy-v2, and the engine applied {said}"):
            list(sample(engine, requests(1, samples=1, name="policy-v2")))


def test_a_request_id_is_under_way_once_and_its_adapter_is_not_taken_away(build: Build) -> None:
    server = FakeServer(piece_seconds=0.1)
    engine = build(server)
    engine.load_adapter("policy-v1", adapter(1))
    asked = requests(1, samples=1)
    running = sample(engine, asked)
    engine.submit([replace(asked[0], request_id=9)])
    with pytest.raises(GateError, match="request 9 is under way already"):
        engine.submit([replace(asked[0], request_id=9)])
    with pytest.raises(GateError, match="still sample from 'policy-v1'"):
        engine.unload_adapter("policy-v1")
    check_whole([*asked, replace(asked[0], request_id=9)], list(running))
    engine.unload_adapter("policy-v1")


SYSTEM = list(range(1000, 1000 + 3 * BLOCK_TOKENS))


def test_the_next_turn_of_a_conversation_goes_where_its_first_turns_are_cached() -> None:
    router = PrefixRouter(3, capacity=64)
    turns = {talk: [*range(talk * 100, talk * 100 + 40)] for talk in range(6)}
    idle = {"loads": [0, 0, 0], "alive": [True] * 3}
    first = {}
    for talk, tokens in turns.items():
        first[talk] = router.choose("policy-v1", tokens, 1, loads=[talk % 3 == 1, talk % 3 == 2, 0], alive=[True] * 3)
    for talk in (3, 1, 5, 0, 4, 2):
        assert router.choose("policy-v1", [*turns[talk], 7, 8, 9], 1, **idle) == first[talk]


def test_another_version_of_the_policy_shares_no_cache() -> None:
    router = PrefixRouter(2, capacity=64)
    assert router.choose("policy-v1", SYSTEM, 1, loads=[1, 0], alive=[True, True]) == 1
    assert router.choose("policy-v1", SYSTEM, 1, loads=[0, 0], alive=[True, True]) == 1
    assert router.choose("policy-v2", SYSTEM, 1, loads=[0, 0], alive=[True, True]) == 0


def test_a_prefix_that_all_prompts_share_does_not_send_them_all_to_one() -> None:
    router, loads = PrefixRouter(4, capacity=1000), [0, 0, 0, 0]
    draws = random.Random(0)
    for _ in range(200):
        chosen = router.choose(None, [*SYSTEM, draws.randrange(10**6)], 4, loads=loads, alive=[True] * 4)
        assert chosen is not None
        loads[chosen] += 4
        assert max(loads) <= SLACK * sum(loads) / 4 + 4
    assert min(loads) > 0


def test_a_dead_server_gets_nothing_and_where_all_are_busy_or_dead_nobody_is_chosen() -> None:
    router = PrefixRouter(2, capacity=8)
    assert router.choose(None, SYSTEM, 4, loads=[0, 0], alive=[False, True]) == 1
    assert router.choose(None, SYSTEM, 4, loads=[0, 0], alive=[False, False]) is None
    assert router.choose(None, SYSTEM, 4, loads=[8, 6], alive=[True, True]) is None
    assert router.choose(None, SYSTEM, 20, loads=[8, 0], alive=[True, True]) == 1, "more than fits goes to an idle one"


def test_a_restarted_server_is_known_to_have_an_empty_cache() -> None:
    router = PrefixRouter(2, capacity=8)
    assert router.choose(None, SYSTEM, 1, loads=[1, 0], alive=[True, True]) == 1
    router.forget(1)
    assert router.choose(None, SYSTEM, 1, loads=[0, 0], alive=[True, True]) == 0


def test_what_it_remembers_is_bounded() -> None:
    router = PrefixRouter(1, capacity=8, kept_blocks=10)
    for start in range(0, 100 * BLOCK_TOKENS, BLOCK_TOKENS):
        router.choose(None, [*range(start, start + BLOCK_TOKENS)], 1, loads=[0], alive=[True])
    assert len(router._seen[0]) == 10


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 16)), min_size=1, max_size=60),
    st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_whatever_comes_the_chosen_one_lives_and_is_not_over_its_bound(
    asked: list[tuple[int, int]], alive: list[bool]
) -> None:
    router, loads = PrefixRouter(3, capacity=40), [0, 0, 0]
    for prompt, cost in asked:
        chosen = router.choose("a", [prompt] * 50, cost, loads=loads, alive=alive)
        if chosen is None:
            assert not any(alive) or all(load for load, lives in zip(loads, alive, strict=True) if lives)
            continue
        assert alive[chosen]
        assert loads[chosen] == 0 or loads[chosen] + cost <= 40
        loads[chosen] += cost
