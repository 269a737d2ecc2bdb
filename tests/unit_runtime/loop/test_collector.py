"""Episodes beside the loop: what a new version does to those under way, and what a kill leaves of them."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from fakes.token_engine import TokenEngine, token

from orbit_runtime.data.samples import build_samples, split_cohorts
from orbit_runtime.environments.turns import SingleTurn
from orbit_runtime.errors import DataError, EngineDiedError, GateError
from orbit_runtime.loop.buffer import EpisodeSnapshot, dump_snapshots, load_snapshots
from orbit_runtime.loop.collect import check_staleness, measure_staleness, with_stale
from orbit_runtime.loop.collector import CallersThread, Collector, EventLoop, OwnThread
from orbit_runtime.loop.publish import Publication
from orbit_runtime.types import AdapterFiles, Completion, Group, Prompt, Request, Rollout, Sample, Sampling
from orbit_runtime.workers.child.signals import StopFlag
from orbit_runtime.workers.user_code.reward_pool import RewardThreads
from orbit_runtime.workers.user_code.reward_protocol import RewardTarget


class Letters:
    eos_ids = (0,)

    def encode_many(self, conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[list[int]]:
        return [[ord(letter) for letter in messages[-1]["content"]] for messages in conversations]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def policy(version: int) -> Publication:
    return Publication(AdapterFiles(version, {}, f"sha256:{version}"), (), ())


def prompts(step: int, count: int = 2) -> list[Prompt]:
    return [Prompt(f"p/{step}-{place}", 0, ({"role": "user", "content": "ab"},)) for place in range(count)]


def length_of(completion: str, prompt: object, fields: object) -> float:
    return float(len(completion))


@pytest.fixture
def scorer() -> Iterator[RewardThreads]:
    with RewardThreads([RewardTarget("length", length_of)]) as threads:
        yield threads


Build = Callable[..., Collector]


@pytest.fixture
def build(scorer: RewardThreads) -> Iterator[Build]:
    made: list[Collector] = []

    def build(
        engine: TokenEngine, taken: int = 0, restored: Sequence[EpisodeSnapshot] = (), overlaps: bool = True
    ) -> Collector:
        sampling = Sampling(max_new_tokens=1000)
        environment = SingleTurn("run", Letters(), scorer, {"length": 1.0}, sampling, 2, seed=0)
        made.append(Collector(environment, engine, taken=taken, restored=restored, overlaps=overlaps))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for each in made:
        each.close()


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def rollouts(collector: Collector, step: int) -> list[Rollout]:
    collected = collector.take(step, StopFlag())
    assert collected is not None
    return [rollout for group in collected.groups_P for rollout in group.rollouts_G]


def short(_: Request) -> int:
    return 5


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_step_comes_back_whole_in_the_prompts_order(build: Build, overlaps: bool) -> None:
    engine = TokenEngine(lambda request: 1 + request.key % 9)
    engine.steps = math.inf
    collector = build(engine, overlaps=overlaps)
    collector.switch(policy(0))
    collector.begin(1, prompts(1))
    found = rollouts(collector, 1)
    assert [(each.prompt_id, each.sample_index) for each in found] == [
        ("p/1-0", 0), ("p/1-0", 1), ("p/1-1", 0), ("p/1-1", 1),
    ]  # fmt: skip
    assert [each.reward for each in found] == [float(len(each.turns[-1].text)) for each in found]
    assert all(set(each.versions_T) == {-1, 0} for each in found)


@pytest.mark.parametrize("overlaps", [True, False])
def test_what_keeps_a_step_from_starting_is_raised_where_it_is_taken(build: Build, overlaps: bool) -> None:
    kept = EpisodeSnapshot(1, 0, ("another prompt", 0, 0), None)
    collector = build(TokenEngine(short), restored=[kept], overlaps=overlaps)
    collector.switch(policy(0))
    collector.begin(1, prompts(1))
    with pytest.raises(DataError, match="keeps a rollout of"):
        collector.take(1, StopFlag())


def test_without_overlap_the_waiting_thread_plays_and_nothing_goes_on_meanwhile(build: Build) -> None:
    threads: set[int] = set()

    def length(_: Request) -> int:
        threads.add(threading.get_ident())
        return 5

    engine = TokenEngine(length)
    engine.steps = math.inf
    collector = build(engine, overlaps=False)
    collector.switch(policy(0))
    collector.begin(1, prompts(1))
    time.sleep(0.05)
    assert not engine.rows
    assert not engine.sampled
    assert len(rollouts(collector, 1)) == 4
    collector.switch(policy(1))
    collector.begin(2, prompts(2, 3), wanted=2)
    assert {version for each in rollouts(collector, 2) for version in each.versions_T} == {-1, 1}
    assert threads == {threading.get_ident()}


def test_a_stop_ends_a_wait_without_overlap(build: Build) -> None:
    engine, stop = TokenEngine(lambda request: 10**9), StopFlag()
    collector = build(engine, overlaps=False)
    collector.switch(policy(0))
    collector.begin(1, prompts(1))
    threading.Timer(0.3, lambda: stop.request("SIGTERM")).start()
    assert collector.take(1, stop) is None
    assert collector.doing == "sampling"
    collector.close()
    assert not engine.rows


def test_an_engines_failure_is_told_without_overlap(build: Build) -> None:
    class Lost(TokenEngine):
        def _step(self) -> None:
            raise EngineDiedError("lost")

    engine = Lost(short)
    engine.steps = math.inf
    collector = build(engine, overlaps=False)
    collector.switch(policy(0))
    collector.begin(1, prompts(1))
    with pytest.raises(EngineDiedError, match="lost"):
        collector.take(1, StopFlag())
    assert [each.prompt_id for each in collector.unanswered()] == ["p/1-0", "p/1-0", "p/1-1", "p/1-1"]


@pytest.mark.parametrize("overlaps", [True, False])
def test_an_engine_that_fails_meanwhile_ends_a_switch(build: Build, overlaps: bool) -> None:
    """Not told, the run would free a slot from which the engine's requests still sample."""

    class Lost(TokenEngine):
        def abort(self, request_ids: Any = None) -> None:
            self.steps = 1

        def _step(self) -> None:
            raise EngineDiedError("lost")

    engine = Lost(lambda request: 10**9)
    collector = build(engine, overlaps=overlaps)
    collector.switch(policy(0))
    collector.begin(1, prompts(1))
    if overlaps:
        until(lambda: len(engine.rows) == 4)
    else:
        stop = StopFlag()
        threading.Timer(0.3, lambda: stop.request("SIGTERM")).start()
        assert collector.take(1, stop) is None
    with pytest.raises(EngineDiedError, match="lost"):
        collector.switch(policy(1))


def test_what_is_under_way_goes_on_under_a_new_version_and_no_token_is_paid_for_twice(build: Build) -> None:
    engine = TokenEngine(lambda request: 200)
    collector = build(engine)
    collector.switch(policy(3))
    collector.begin(1, prompts(1))
    for version in (4, 5):
        engine.steps = 40
        until(lambda: not engine.steps)
        collector.switch(policy(version))
        assert all(row.request.adapter == f"policy-v{version}" for row in engine.rows.values())
    engine.steps = math.inf
    found = rollouts(collector, 1)
    for each in found:
        versions = each.versions_T.tolist()[2:]
        assert versions == sorted(versions)
        assert set(versions) == {3, 4, 5}
        answer = each.token_ids_T.tolist()[2:]
        keys = [key for key, position, _ in engine.sampled if position == 0]
        assert any(answer == [token(key, position) for position in range(200)] for key in keys)
    assert len({(key, position) for key, position, _ in engine.sampled}) == len(engine.sampled) == 4 * 200


def test_steps_under_way_wait_for_their_turn_and_are_counted(build: Build) -> None:
    engine = TokenEngine(short)
    collector = build(engine)
    collector.switch(policy(0))
    for step in (1, 2, 3):
        collector.begin(step, prompts(step))
    engine.steps = math.inf
    until(lambda: collector._buffer.counts == (12, 0))
    collected = collector.take(1, StopFlag())
    assert collected is not None
    assert (collected.waiting, collected.unfinished) == (8, 0)
    assert {each.step for each in rollouts(collector, 2)} == {2}


def test_a_stop_leaves_what_was_sampled_for_the_checkpoint(build: Build) -> None:
    engine = TokenEngine(lambda request: 500 if request.key % 2 else 5)
    collector, stop = build(engine), StopFlag()
    collector.switch(policy(0))
    collector.begin(1, prompts(1, 8))
    engine.steps = 50
    until(lambda: not engine.steps and collector._buffer.counts[0])
    stop.request("SIGTERM")
    assert collector.take(1, stop) is None
    collector.pause()
    kept = load_snapshots(dump_snapshots(collector.keep()), where="checkpoint")
    collector.close()
    ended = [each for each in kept if each.played]
    assert 0 < len(ended) < len(kept) == 16

    again = TokenEngine(lambda request: 500 if request.key % 2 else 5)
    again.steps = math.inf
    resumed = build(again, 0, kept)
    resumed.switch(policy(1))
    resumed.begin(1, prompts(1, 8))
    found = rollouts(resumed, 1)
    for each in ended:
        assert each.played is not None
        assert found[each.number] == each.played.rollout
    paid = [(key, position) for key, position, _ in engine.sampled]
    anew = [(key, position) for key, position, _ in again.sampled]
    assert not set(paid) & set(anew), "no token is paid for twice"
    assert len(paid) + len(anew) == sum(sum(each.loss_mask_T) for each in found)
    assert any(set(each.versions_T) == {-1, 0, 1} for each in found)


def test_a_stop_keeps_what_has_ended_although_the_engine_does_not_answer(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deaf(TokenEngine):
        def abort(self, request_ids: object = None) -> None: ...

    engine = Deaf(lambda request: 500 if request.key % 2 else 5)
    collector = build(engine)
    collector.switch(policy(0))
    collector.begin(1, prompts(1, 8))
    engine.steps = 50
    until(lambda: not engine.steps and collector._buffer.counts[0])
    monkeypatch.setattr("orbit_runtime.loop.collector.END_SECONDS", 0.05)
    collector.pause()
    kept = collector.keep()
    engine.rows.clear()
    assert 0 < len(kept) < 16
    assert all(each.played for each in kept)


def test_an_environment_that_answers_otherwise_after_a_kill_gets_new_tokens(build: Build) -> None:
    engine = TokenEngine(lambda request: 300)
    collector = build(engine)
    collector.switch(policy(0))
    collector.begin(1, prompts(1, 1))
    engine.steps = 50
    until(lambda: not engine.steps)
    collector.pause()
    kept = collector.keep()
    moved = [
        EpisodeSnapshot(
            each.step, each.number, each.name, None, tuple(type(p)(p.key, (1, 2, 3), p.completion) for p in each.paid)
        )
        for each in kept
    ]
    again = TokenEngine(short)
    again.steps = math.inf
    resumed = build(again, 0, moved)
    resumed.switch(policy(1))
    resumed.begin(1, prompts(1, 1))
    assert [sum(each.loss_mask_T) for each in rollouts(resumed, 1)] == [5, 5]


def test_an_engine_that_samples_under_another_version_than_it_was_asked_for_ends_the_run(build: Build) -> None:
    engine = TokenEngine(short, lie=1)
    engine.steps = math.inf
    collector = build(engine)
    collector.switch(policy(0))
    collector.begin(1, prompts(1))
    with pytest.raises(GateError, match=r"versions \[1\], not 0"):
        collector.take(1, StopFlag())


def test_an_engine_that_dies_ends_the_run_and_not_only_who_asked_it(build: Build) -> None:
    class Dying(TokenEngine):
        def _step(self) -> None:
            raise EngineDiedError("gone")

    engine = Dying(short)
    collector = build(engine)
    collector.switch(policy(0))
    collector.begin(1, prompts(1))
    collector.begin(2, prompts(2))
    # The event loop asks for them one step after the other, and the engine dies at its first token.
    until(lambda: len(engine.rows) == 8)
    engine.steps = math.inf
    for step in (1, 2):
        with pytest.raises(EngineDiedError, match="gone"):
            collector.take(step, StopFlag())
    waited = collector.unanswered()
    assert {(each.prompt_id, each.sample_index) for each in waited} == {
        (f"p/{step}-{place}", sample) for step in (1, 2) for place in range(2) for sample in range(2)
    }
    assert {each.stage for each in waited} == {"sampling"}
    assert all(each.reason.endswith(" s without an answer when the engine failed") for each in waited)
    engine.rows.clear()


def test_a_completion_that_is_ended_with_its_last_token_has_ended(build: Build) -> None:
    class Racing(TokenEngine):
        """Tells of an abort although the completion is as long as it may be."""

        def _end(self, request_id: int, reason: str) -> None:
            super()._end(request_id, "abort")

    engine = Racing(lambda request: request.sampling.max_new_tokens)
    engine.steps = math.inf
    collector = build(engine)
    collector.switch(policy(0))
    collector.begin(1, prompts(1, 1))
    assert [each.finish_reason for each in rollouts(collector, 1)] == ["length", "length"]


def test_closing_ends_what_is_under_way(build: Build) -> None:
    engine = TokenEngine(lambda request: 10**9)
    engine.steps = math.inf
    collector = build(engine)
    collector.switch(policy(0))
    collector.begin(1, prompts(1))
    until(lambda: engine.sampled)
    collector.close()
    collector.close()
    assert not engine.rows
    assert not [thread for thread in threading.enumerate() if thread.name == "orbit-collector" and thread.is_alive()]


def named(engine: TokenEngine, count: int) -> dict[int, int]:
    """Which prompt each request is of, by its key: requests of a step come in the prompts' order."""
    return {row.request.key: place // 2 for place, row in enumerate([*engine.rows.values()][:count])}


def test_a_step_goes_on_without_its_stragglers_which_end_at_the_engine(build: Build) -> None:
    slow: set[int] = set()
    engine = TokenEngine(lambda request: 10**6 if request.key in slow else 5)
    collector = build(engine)
    collector.switch(policy(0))
    collector.begin(1, prompts(1, 4), wanted=2)
    until(lambda: len(engine.rows) == 8)
    keys = named(engine, 8)
    # Of the second prompt both samples never end; of the last one only one, and the other's tokens are lost too.
    slow |= {key for key, place in keys.items() if place == 1} | {max(k for k, place in keys.items() if place == 3)}
    engine.steps = math.inf
    collected = collector.take(1, StopFlag())
    assert collected is not None
    assert [group.prompt.prompt_id for group in collected.groups_P] == ["p/1-0", "p/1-2"]
    assert all(len(group.rollouts_G) == 2 for group in collected.groups_P)
    trained = sum(sum(each.loss_mask_T) for group in collected.groups_P for each in group.rollouts_G)
    assert trained == 4 * 5
    assert collected.prompts_cancelled == 2
    assert collected.tokens_cancelled == len(engine.sampled) - trained > 0
    assert not engine.rows, "something is under way"
    assert collector.keep() == ()


def test_a_straggler_that_is_being_scored_is_not_waited_for(scorer: RewardThreads) -> None:
    class Slow(SingleTurn):
        ended: ClassVar[list[str]] = []

        async def play(self, episode: Any, tokens: Any) -> Any:
            played = await super().play(episode, tokens)
            if episode.prompt.prompt_id == "p/1-0":
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    self.ended.append(episode.prompt.prompt_id)
                    raise
            return played

    engine = TokenEngine(short)
    engine.steps = math.inf
    environment = Slow("run", Letters(), scorer, {"length": 1.0}, Sampling(max_new_tokens=1000), 2, seed=0)  # type: ignore[arg-type]
    with Collector(environment, engine) as collector:  # type: ignore[arg-type]
        collector.switch(policy(0))
        collector.begin(1, prompts(1, 3), wanted=2)
        collected = collector.take(1, StopFlag())
        assert collected is not None
        assert [group.prompt.prompt_id for group in collected.groups_P] == ["p/1-1", "p/1-2"]
        assert (collected.prompts_cancelled, collected.tokens_cancelled) == (1, 10)
        assert Slow.ended == ["p/1-0"] * 2


def test_a_later_step_is_cut_while_the_one_before_trains_and_a_kill_keeps_which_groups_those_were(
    build: Build,
) -> None:
    slow: set[int] = set()
    engine = TokenEngine(lambda request: 10**6 if request.key in slow else 5)
    collector = build(engine)
    collector.switch(policy(0))
    collector.begin(1, prompts(1), wanted=2)
    collector.begin(2, prompts(2, 3), wanted=2)
    until(lambda: len(engine.rows) == 10)
    slow |= {row.request.key for row in [*engine.rows.values()][4:6]}
    engine.steps = math.inf
    until(lambda: not engine.rows and collector._buffer.counts == (8, 0))
    kept = load_snapshots(dump_snapshots(collector.keep()), where="checkpoint")
    assert [each.number for each in kept if each.cancelled] == [0, 1]
    lost = sum(each.cancelled or 0 for each in kept)
    rollouts(collector, 1)
    (first,) = [rollouts(collector, 2)]
    assert {each.prompt_id for each in first} == {"p/2-1", "p/2-2"}

    again = TokenEngine(short)
    resumed = build(again, 1, kept)
    resumed.switch(policy(1))
    resumed.begin(2, prompts(2, 3), wanted=2)
    collected = resumed.take(2, StopFlag())
    assert collected is not None
    assert [each for group in collected.groups_P for each in group.rollouts_G] == first
    assert (collected.prompts_cancelled, collected.tokens_cancelled) == (1, lost)
    assert not again.sampled, "what was decided is not asked for again"


def test_a_publish_while_a_step_waits_moves_its_stragglers_and_they_are_still_cancelled(build: Build) -> None:
    slow: set[int] = set()
    engine = TokenEngine(lambda request: 10**6 if request.key in slow else 40)
    collector = build(engine)
    collector.switch(policy(0))
    collector.begin(1, prompts(1, 3), wanted=2)
    until(lambda: len(engine.rows) == 6)
    slow |= {row.request.key for row in [*engine.rows.values()][:2]}
    engine.steps = 10
    until(lambda: not engine.steps)
    collector.switch(policy(1))
    engine.steps = math.inf
    collected = collector.take(1, StopFlag())
    assert collected is not None
    assert [group.prompt.prompt_id for group in collected.groups_P] == ["p/1-1", "p/1-2"]
    assert collected.tokens_cancelled == len(engine.sampled) - 4 * 40
    assert not engine.rows


def test_fewer_prompts_than_are_wanted_all_train(build: Build) -> None:
    engine = TokenEngine(short)
    engine.steps = math.inf
    collector = build(engine)
    collector.switch(policy(0))
    collector.begin(1, prompts(1), wanted=5)
    collected = collector.take(1, StopFlag())
    assert collected is not None
    assert (len(collected.groups_P), collected.prompts_cancelled, collected.tokens_cancelled) == (2, 0, 0)


def rollout(versions: Sequence[int]) -> Rollout:
    count = len(versions)
    return Rollout(
        "run", 1, "p", 0, (), [0] * count, [int(each >= 0) for each in versions], [0.0] * count, list(versions),
        1.0, "value", {}, "stop",
    )  # type: ignore[arg-type]  # fmt: skip


def test_staleness_is_counted_by_the_token() -> None:
    groups = [Group(prompts(1)[0], (rollout([-1, -1, 5, 5, 7]), rollout([-1, 8])))]
    found = measure_staleness(groups, 8)
    assert (found.mean, found.max) == ((3 + 3 + 1 + 0) / 4, 3)
    check_staleness(found, 3)
    with pytest.raises(GateError, match="3 policy versions old"):
        check_staleness(found, 2)
    nothing = measure_staleness([Group(prompts(1)[0], (rollout([-1]),))], 8)
    assert (nothing.mean, nothing.max) == (0.0, 0)

    samples = [Sample([0] * 5, [0, 0, 1, 1, 1], {}, 0, 2), Sample([0] * 2, [0, 1], {}, 0, 1)]  # type: ignore[arg-type]
    marked = with_stale(samples, groups, 8)
    assert [each.columns["stale"].tolist() for each in marked] == [[0, 0, 1, 1, 1], [0, 0]]
    fresh = [Group(prompts(1)[0], (rollout([-1, -1, 8, 8, 8]), rollout([-1, 8])))]
    assert with_stale(samples, fresh, 8) == samples


def test_stale_tokens_stay_with_their_sample_where_a_prompt_has_cohorts() -> None:
    """Samples lie cohort by cohort, the rollouts of a prompt episode by episode."""
    found = [("white", [-1, 5, 5]), ("black", [-1, -1, -1, 8]), ("white", [-1, 8, 8]), ("black", [-1, 5])]
    group = Group(prompts(1)[0], tuple(replace(rollout(versions), cohort=cohort) for cohort, versions in found))
    samples = build_samples(split_cohorts(group))
    marked = with_stale(samples, [group], 8)
    assert [each.columns["stale"].tolist() for each in marked] == [[0, 1, 1], [0, 0, 0], [0, 0, 0, 0], [0, 1]]


def test_completions_are_what_the_engine_said(build: Build) -> None:
    """The fake itself: a continued completion holds the tokens before it."""
    engine = TokenEngine(short)
    before = Completion(0, [97], [-0.5], [0], "abort", "a")  # type: ignore[arg-type]
    engine.submit([Request(1, 3, (1,), Sampling(), "policy-v2", before)])
    engine._step()
    assert engine.rows[1].versions == [0, 2]


@pytest.fixture(params=["own", "caller's"])
def loop(request: pytest.FixtureRequest) -> Iterator[EventLoop]:
    made: EventLoop = OwnThread("episodes") if request.param == "own" else CallersThread()
    yield made
    made.close()


async def after(seconds: float, value: int = 7) -> int:
    await asyncio.sleep(seconds)
    return value


def test_what_was_started_ends_while_another_call_waits(loop: EventLoop) -> None:
    first = loop.start(after(0.01))
    assert loop.run(after(0.2, 8)) == 8
    assert first.done()
    assert first.result() == 7


def test_a_wait_ends_when_its_time_is_over_or_its_work_is_done(loop: EventLoop) -> None:
    started = loop.start(after(0.3))
    loop.wait(started, 0.01)
    assert not started.done()
    began = time.monotonic()
    loop.wait(started, 60.0)
    assert started.result() == 7
    assert time.monotonic() - began < 30


def test_errors_come_to_who_waits(loop: EventLoop) -> None:
    async def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        loop.run(fail())
    started = loop.start(fail())
    loop.wait(started, 60.0)
    with pytest.raises(ValueError, match="broken"):
        started.result()
    with pytest.raises(TimeoutError):
        loop.run(after(60.0), 0.01)


def test_what_is_cancelled_ends_with_the_next_call(loop: EventLoop) -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            ended.append("ended")

    started = loop.start(work())
    loop.wait(started, 0.05)
    started.cancel()
    loop.run(after(0.05))
    assert started.done()
    assert ended == ["ended"]


def test_an_error_that_nobody_asks_for_is_no_traceback(loop: EventLoop, capfd: pytest.CaptureFixture[str]) -> None:
    async def fail() -> None:
        raise ValueError("broken")

    loop.wait(loop.start(fail()), 60.0)
    gc.collect()
    assert "Traceback" not in capfd.readouterr().err


def test_which_thread_works() -> None:
    async def where() -> int:
        return threading.get_ident()

    own, callers = OwnThread("episodes"), CallersThread()
    try:
        assert own.run(where()) != threading.get_ident()
        assert callers.run(where()) == threading.get_ident()
    finally:
        own.close()
        callers.close()
