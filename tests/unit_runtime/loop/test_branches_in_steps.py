"""Branches of an episode in the loop: new versions, kills, stragglers, and whom advantages compare."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from fakes.played_here import PlayedHere
from fakes.token_engine import TokenEngine, token

from orbit_runtime.algorithms.table import build_algorithm
from orbit_runtime.data.packing import split_mini_batches
from orbit_runtime.data.samples import build_samples, split_cohorts
from orbit_runtime.environments import Chosen, Policy
from orbit_runtime.environments.branching import Branching
from orbit_runtime.environments.episodes import EpisodeLimits, EpisodeSettings
from orbit_runtime.evaluation.player import RequestLimiter, _InTurn
from orbit_runtime.loop.advantages import build_batch, describe_training
from orbit_runtime.loop.buffer import EpisodeSnapshot, dump_snapshots, load_snapshots
from orbit_runtime.loop.collect import count_groups, teaches
from orbit_runtime.loop.collector import Collector
from orbit_runtime.loop.multiplexer import RequestMultiplexer
from orbit_runtime.spec import OrbitRun
from orbit_runtime.types import Completion, Group, Prompt, Request, Rollout, Sampling
from orbit_runtime.workers.child.signals import StopFlag
from orbit_runtime.workers.user_code.reward_pool import RewardThreads
from tests.unit_runtime.environments.test_multi_turn import Written
from tests.unit_runtime.loop.test_buffer import check_integrity
from tests.unit_runtime.loop.test_collector import policy, prompts, rollouts, until


class Tree:
    """Two inner answers with two leaves each, of which the last is not chosen."""

    rollouts: Any = ("inner", "inner", "leaf", "leaf", "leaf", "leaf")

    async def play(self, asked: Policy, prompt: Any, fields: Any, seed: int) -> list[Chosen]:
        inner = await asked.begin(prompt).answers(2)
        leaves = [
            leaf for both in await asyncio.gather(*(each.say("on").answers(3) for each in inner)) for leaf in both
        ]
        return [Chosen(each, len(each.text)) for each in [*inner, *leaves[:2], *leaves[3:5]]]


def collector(engine: TokenEngine, taken: int = 0, restored: Sequence[EpisodeSnapshot] = ()) -> Collector:
    settings = EpisodeSettings("run", Sampling(max_new_tokens=1000), EpisodeLimits(context=10**7), 12, 0, True)
    environment = Branching(
        settings, Written(), RewardThreads([]), {}, lambda: PlayedHere(Tree()), Tree.rollouts,  # type: ignore[arg-type, return-value]
    )  # fmt: skip
    return Collector(environment, engine, taken=taken, restored=restored)  # type: ignore[arg-type]


def check_rollouts(found: Sequence[Rollout], engine: TokenEngine) -> None:
    assert [each.cohort for each in found] == [*Tree.rollouts] * (len(found) // 6)
    answers = {"".join(chr(token(key, place)) for place in range(engine.length(None)))  # type: ignore[arg-type]
               for key, position, _ in engine.sampled if position == 0}  # fmt: skip
    assert all(turn.text in answers for each in found for turn in each.turns if turn.role == "assistant")


def test_a_new_version_moves_every_branch_and_a_kill_loses_no_token_of_any() -> None:
    engine = TokenEngine(lambda request: 100)
    with collector(engine) as first:
        first.switch(policy(0))
        first.begin(1, prompts(1, 1))
        for version, steps in ((1, 70), (2, 70)):  # in the middle of the inner answers, and of the leaves
            engine.steps = steps
            until(lambda: not engine.steps)
            first.switch(policy(version))
        engine.steps = 10
        until(lambda: not engine.steps)
        assert len(engine.rows) == 12, "both trees of the prompt have all their leaves under way"
        first.pause()
        kept = load_snapshots(dump_snapshots(first.keep()), where="checkpoint")
    assert [len(each.paid) for each in kept] == [8, 8]

    again = TokenEngine(lambda request: 100)
    again.steps = math.inf
    with collector(again, 0, kept) as resumed:
        resumed.switch(policy(3))
        resumed.begin(1, prompts(1, 1))
        found = rollouts(resumed, 1)
    paid = [(key, position) for key, position, _ in (*engine.sampled, *again.sampled)]
    assert len(set(paid)) == len(paid) == 2 * (2 + 6) * 100, "no token of any branch is paid for twice"
    assert {*found[0].versions_T} == {-1, 0, 1}
    assert {*found[2].versions_T} == {-1, 1, 2, 3}
    assert found[0].counts == found[6].counts == {"tokens_unchosen": 200}

    whole = TokenEngine(lambda request: 100)
    whole.steps = math.inf
    with collector(whole) as straight:
        straight.switch(policy(0))
        straight.begin(1, prompts(1, 1))
        undisturbed = rollouts(straight, 1)
    assert [each.token_ids_T for each in found] == [each.token_ids_T for each in undisturbed]
    check_rollouts(found, whole)


def test_an_ended_tree_is_kept_whole() -> None:
    engine = TokenEngine(lambda request: 5)
    engine.steps = math.inf
    with collector(engine) as first:
        first.switch(policy(0))
        first.begin(1, prompts(1, 1))
        until(lambda: first._buffer.counts == (2, 0))
        check_integrity(first._buffer)
        kept = load_snapshots(dump_snapshots(first.keep()), where="checkpoint")
        found = rollouts(first, 1)
    again = TokenEngine(lambda request: 5)
    with collector(again, 0, kept) as resumed:
        resumed.switch(policy(1))
        resumed.begin(1, prompts(1, 1))
        assert rollouts(resumed, 1) == found
    assert not again.sampled


@pytest.mark.parametrize("steps", [3, 12])
def test_a_straggling_tree_is_cancelled_with_all_its_branches(steps: int) -> None:
    def length(request: Request) -> int:
        # Of the first prompt's trees one inner answer each never ends, or some leaf does not.
        of_first = chr(request.prompt_ids_T[6]) == "z"
        is_leaf = request.prompt_ids_T.count(ord("[")) > 2
        return 10**6 if of_first and (steps == 3 or is_leaf) and request.key % 2 else 5

    engine = TokenEngine(length)
    with collector(engine) as made:
        made.switch(policy(0))
        asked = [
            Prompt("p/z", 0, ({"role": "user", "content": "z"},)),
            *(Prompt(f"p/{place}", 0, ({"role": "user", "content": "a"},)) for place in range(2)),
        ]
        made.begin(1, asked, wanted=2)
        engine.steps = math.inf
        collected = made.take(1, StopFlag())
        assert collected is not None
        assert not engine.rows, "a branch is still being sampled"
        assert [group.prompt.prompt_id for group in collected.groups_P] == ["p/0", "p/1"]
        assert all(len(group.rollouts_G) == 12 for group in collected.groups_P)
        used = sum(sum(each.loss_mask_T) for group in collected.groups_P for each in group.rollouts_G)
        unchosen = sum(each.counts.get("tokens_unchosen", 0) for g in collected.groups_P for each in g.rollouts_G)
        assert used + unchosen == 2 * 2 * 8 * 5
        assert collected.tokens_cancelled == len(engine.sampled) - used - unchosen > 0


def test_an_end_reaches_requests_that_were_not_submitted_yet() -> None:
    engine = TokenEngine(lambda request: 5)

    async def run() -> None:
        asking = RequestMultiplexer(engine)  # type: ignore[arg-type]
        await asking.switch(policy(0))
        serving = asyncio.create_task(asking.serve())

        def ask(key: int, who: str) -> asyncio.Task[Completion]:
            return asyncio.create_task(asking.ask((1,), Sampling(), key, None, who))

        submitted = ask(1, "tree")
        while not engine.rows:
            await asyncio.sleep(0)
        late, other = ask(2, "tree"), ask(3, "other")
        await asyncio.sleep(0)
        assert len(engine.rows) == 1, "they are submitted in the loop's next turn"
        await asking.end({"tree"})
        await asyncio.wait((submitted, late))
        assert (submitted.result().finish_reason, late.cancelled()) == ("abort", True)
        engine.steps = math.inf
        assert (await other).finish_reason == "stop"
        assert {key for key, _, _ in engine.sampled} == {3}
        serving.cancel()

    asyncio.run(run())


def test_branches_of_an_evaluation_ask_with_a_place_each() -> None:
    under_way, most = 0, 0

    class Slow:
        async def sample(self, prompt_ids_T: Any, sampling: Sampling, *, key: int) -> Completion:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.001)
            under_way -= 1
            return Completion(0, [1], [0.0], [0], "stop", "")  # type: ignore[arg-type]

    async def run() -> None:
        places = RequestLimiter(3)
        for _ in range(2):
            await places.take(begins=True)
            episode = _InTurn(Slow(), places)  # type: ignore[arg-type]
            await asyncio.gather(*(episode.sample([1], Sampling(), key=key) for key in range(8)))
            episode.give_back()
        assert places._free == 3, "every place came back, once"

    asyncio.run(run())
    assert most == 3


def rollout(cohort: str, index: int, reward: float | None, prefix: int = 0) -> Rollout:
    return Rollout(
        "run", 1, "p", index, (), array("i", [prefix, 5, 6]), array("b", [0, 1, 1]), array("f", [0, -1, -1]),
        array("i", [-1, 0, 0]), reward, "value" if reward is not None else "crash", {}, "stop", cohort=cohort,
    )  # fmt: skip


def group(*rewards: tuple[str, float | None], name: str = "p") -> Group:
    made = [rollout(cohort, index, reward, index % 2) for index, (cohort, reward) in enumerate(rewards)]
    return Group(Prompt(name, 0, ()), tuple(made))


def spec(**algorithm: Any) -> Any:
    return OrbitRun.model_validate({
        "apiVersion": "orbitrl.dev/v1alpha1",
        "kind": "OrbitRun",
        "metadata": {"name": "sides"},
        "spec": {
            "model": {"uri": "builtin://tiny-adder"},
            "algorithm": {"type": "DrGRPO", "groupSize": 4, **algorithm},
            "data": {"prompts": [{"uri": "builtin://two-digit-addition"}]},
            "environment": {"rewards": [{"name": "correct", "type": "ExactMatch"}]},
            "training": {"steps": 1},
        },
    }).spec  # fmt: skip


SIDES = group(("white", 1.0), ("black", 5.0), ("white", 0.0), ("black", 9.0))


def test_advantages_compare_rollouts_of_one_cohort() -> None:
    asked = spec()
    algorithm = build_algorithm(asked.algorithm)
    samples = build_batch(asked, algorithm, None, [SIDES])  # type: ignore[arg-type]
    # By hand: the means are 0.5 of white and 7 of black.
    told = describe_training(asked.algorithm.objective, [SIDES], samples, [0.25, 0.5], chr)
    assert {key: each["advantage"] for key, each in told.items()} == {
        ("p", 0, 0): 0.5, ("p", 0, 2): -0.5, ("p", 0, 1): -2.0, ("p", 0, 3): 2.0
    }  # fmt: skip
    assert [[each.sample_index for each in cohort.rollouts_G] for cohort in split_cohorts(SIDES)] == [[0, 2], [1, 3]]


def test_a_prompt_teaches_if_one_of_its_cohorts_does() -> None:
    apart = group(("white", 1.0), ("black", 0.0), ("white", 1.0), ("black", 0.0))
    assert not teaches(apart), "white always wins: nothing is to be learnt from that"
    assert (count_groups([apart]).equal, count_groups([SIDES]).equal, count_groups([apart]).groups) == (1, 0, 1)
    half = group(("white", 1.0), ("black", 0.0), ("white", 1.0), ("black", 1.0))
    assert teaches(half)
    asked = spec(dynamicSampling={"maxRounds": 1})
    samples = build_batch(asked, build_algorithm(asked.algorithm), None, [half])  # type: ignore[arg-type]
    assert len(samples) == 2, "with dynamic sampling only the cohort that teaches trains"


def test_a_mini_batch_holds_whole_prompts_whatever_their_rollouts_begin_with() -> None:
    groups = [cohort for name in "pq" for cohort in split_cohorts(group(*[("a", 1.0), ("b", 0.0)] * 2, name=name))]
    samples = build_samples(groups)
    assert [each.prefix_id for each in samples] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert split_mini_batches(samples, 1) == [(0, 1, 2, 3), (4, 5, 6, 7)]
