"""Episodes beside the loop: what a new version does to those under way, and what a kill leaves of them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
from fakes.token_engine import TokenEngine, token

from orbit_runtime.environments.single_turn import SingleTurn
from orbit_runtime.errors import EngineDiedError, GateError
from orbit_runtime.loop.buffer import Kept, dump_kept, load_kept
from orbit_runtime.loop.collector import Collector
from orbit_runtime.loop.publish import Publication
from orbit_runtime.loop.signals import StopFlag
from orbit_runtime.loop.staleness import check_staleness, measure_staleness, with_stale
from orbit_runtime.types import AdapterFiles, Completion, Prompt, Request, Rollout, Sample, Sampling
from orbit_runtime.workers.reward_protocol import RewardTarget
from orbit_runtime.workers.reward_threads import RewardThreads


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

    def build(engine: TokenEngine, taken: int = 0, restored: Sequence[Kept] = ()) -> Collector:
        sampling = Sampling(max_new_tokens=1000)
        environment = SingleTurn("run", Letters(), scorer, {"length": 1.0}, sampling, 2, seed=0)
        made.append(Collector(environment, engine, taken=taken, restored=restored))  # type: ignore[arg-type]
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


def test_a_step_comes_back_whole_in_the_prompts_order(build: Build) -> None:
    engine = TokenEngine(lambda request: 1 + request.key % 9)
    engine.steps = math.inf
    collector = build(engine)
    collector.switch(policy(0))
    collector.begin(1, prompts(1))
    found = rollouts(collector, 1)
    assert [(each.prompt_id, each.sample_index) for each in found] == [
        ("p/1-0", 0), ("p/1-0", 1), ("p/1-1", 0), ("p/1-1", 1),
    ]  # fmt: skip
    assert [each.reward for each in found] == [float(len(each.turns[-1].text)) for each in found]
    assert all(set(each.versions_T) == {-1, 0} for each in found)


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
    kept = load_kept(dump_kept(collector.keep()), where="checkpoint")
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
        Kept(each.step, each.number, each.name, None, tuple(type(p)(p.key, (1, 2, 3), p.completion) for p in each.paid))
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
    engine.steps = math.inf
    for step in (1, 2):
        with pytest.raises(EngineDiedError, match="gone"):
            collector.take(step, StopFlag())
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


def rollout(versions: Sequence[int]) -> Rollout:
    count = len(versions)
    return Rollout(
        "run", 1, "p", 0, (), [0] * count, [int(each >= 0) for each in versions], [0.0] * count, list(versions),
        1.0, "value", {}, "stop",
    )  # type: ignore[arg-type]  # fmt: skip


def test_staleness_is_counted_by_the_token() -> None:
    from orbit_runtime.types import Group

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


def test_completions_are_what_the_engine_said(build: Build) -> None:
    """The fake itself: a continued completion holds the tokens before it."""
    engine = TokenEngine(short)
    before = Completion(0, [97], [-0.5], [0], "abort", "a")  # type: ignore[arg-type]
    engine.submit([Request(1, 3, (1,), Sampling(), "policy-v2", before)])
    engine._step()
    assert engine.rows[1].versions == [0, 2]
