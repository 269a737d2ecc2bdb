"""Episodes that ask the policy themselves: which tokens train, what draws follow from, and what limits reach."""

from __future__ import annotations

import asyncio
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.played_here import PlayedHere
from hypothesis import given
from hypothesis import strategies as st

from orbit_runtime.environments import Branch, Chosen, Policy
from orbit_runtime.environments.branching import Branching
from orbit_runtime.environments.episodes import EpisodeLimits, EpisodeSettings, FinishedEpisode
from orbit_runtime.environments.targets import check_group_size
from orbit_runtime.errors import ManifestError
from orbit_runtime.types import Completion, FinishReason, Prompt, Sampling
from orbit_runtime.workers.user_code.entrypoints import TargetError
from orbit_runtime.workers.user_code.environment_pool import EnvironmentPool
from orbit_runtime.workers.user_code.environment_protocol import EnvironmentLimits, EnvironmentTarget
from orbit_runtime.workers.user_code.environment_template import _cohorts
from orbit_runtime.workers.user_code.reward_pool import RewardThreads
from orbit_runtime.workers.user_code.reward_protocol import RewardTarget
from tests.unit_runtime.environments.test_multi_turn import END, PROMPT, Written


class ByKey:
    """A policy whose answers are functions of the draw's key; it keeps what it was asked."""

    def __init__(self, finish: FinishReason = "stop") -> None:
        self.finish = finish
        self.asked: dict[int, list[int]] = {}
        self.rooms: list[int] = []
        self.told: dict[int, list[int]] = {}
        self.together = self.most_together = 0

    async def sample(self, prompt_ids_T: Sequence[int], sampling: Sampling, *, key: int) -> Completion:
        assert key not in self.asked, "two answers share their draws"
        self.asked[key] = [*prompt_ids_T]
        self.rooms.append(sampling.max_new_tokens)
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        for _ in range(key % 5):
            await asyncio.sleep(0)
        self.together -= 1
        text = "".join(chr(97 + (key >> shift) % 26) for shift in range(1 + key % 3))[: sampling.max_new_tokens - 1]
        ids = self.told[key] = [*map(ord, text), END]
        return Completion(0, ids, [-0.5] * len(ids), [4] * len(ids), self.finish, text)  # type: ignore[arg-type]


def play(
    environment: Any,
    policy: ByKey,
    limits: EpisodeLimits | None = None,
    *,
    rewards: Mapping[str, Any] | None = None,
    group_size: int | None = None,
    only_first: bool = False,
    process: Callable[[Any], Any] = PlayedHere,
    clock: Callable[[], float] = time.monotonic,
) -> list[FinishedEpisode]:
    """One group of it."""
    rollouts = getattr(environment, "rollouts", 1)
    cohorts = [""] * rollouts if isinstance(rollouts, int) else rollouts
    scorer = RewardThreads([RewardTarget(name, function) for name, function in (rewards or {}).items()])
    size = group_size or len(cohorts)
    settings = EpisodeSettings("run", Sampling(max_new_tokens=16), limits or EpisodeLimits(), size, 0, True, clock)
    made = Branching(
        settings, Written(), scorer, dict.fromkeys(rewards or {}, 0.5), lambda: process(environment),
        cohorts, only_first=only_first,
    )  # fmt: skip
    episodes = made.build_episodes([PROMPT], 3)

    async def run() -> list[FinishedEpisode]:
        return list(await asyncio.gather(*(made.play(each, policy) for each in episodes)))

    return asyncio.run(run())


class Grows:
    """Branches as it is told: from which branch, what it says there, and how many answers it asks for."""

    def __init__(self, plan: Sequence[tuple[int, str, int]], chosen: Sequence[int]) -> None:
        self.plan, self.chosen, self.rollouts = plan, chosen, len(chosen)

    async def play(self, policy: Policy, prompt: Any, fields: Any, seed: int) -> list[Chosen]:
        branches = await policy.begin(prompt).answers(2)
        for parent, text, count in self.plan:
            branches += await branches[parent % len(branches)].say(text).answers(count)
        return [Chosen(branches[each % len(branches)], each) for each in self.chosen]


words = st.text(st.characters(codec="ascii", categories=["L"]), max_size=4)


@given(
    st.lists(st.tuples(st.integers(0, 9), words, st.integers(1, 3)), max_size=5),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
def test_masks_cover_what_was_sampled_and_no_token_trains_twice(
    plan: list[tuple[int, str, int]], chosen: list[int]
) -> None:
    policy = ByKey()
    (played,) = play(Grows(plan, chosen), policy, EpisodeLimits(turns=20))
    answers = {(*policy.asked[key], *told) for key, told in policy.told.items()}
    trained: list[tuple[int, ...]] = []
    for rollout in played.rollouts:
        ids = rollout.token_ids_T.tolist()
        assert tuple(ids) in answers, "the tokens are those that were read and sampled"
        for turn in rollout.turns:
            (flag,) = {*rollout.loss_mask_T[turn.start : turn.end]}
            assert not flag or (turn.role == "assistant" and tuple(ids[: turn.end]) in answers)
            if flag:
                trained.append(tuple(ids[: turn.end]))
        for flag, logprob, version in zip(rollout.loss_mask_T, rollout.logprobs_T, rollout.versions_T, strict=True):
            assert (logprob, version) == ((-0.5, 4) if flag else (0.0, -1))
    held = {tuple(each.token_ids_T[: turn.end]) for each in played.rollouts for turn in each.turns
            if turn.role == "assistant"}  # fmt: skip
    assert sorted(trained) == sorted(held), "each answer of a rollout trains once"
    sampled = sum(map(len, policy.told.values()))
    found = sum(sum(each.loss_mask_T) for each in played.rollouts)
    assert played.rollout.counts["tokens_unchosen"] == sampled - found
    assert [each.sample_index for each in played.rollouts] == [*range(len(chosen))]
    assert [each.reward for each in played.rollouts] == chosen
    again = ByKey()
    assert play(Grows(plan, chosen), again, EpisodeLimits(turns=20)) == [played]
    assert again.asked == policy.asked


class Tree:
    """Two inner answers, and two leaves of each."""

    rollouts: Any = ("inner", "inner", "leaf", "leaf", "leaf", "leaf")

    async def play(self, policy: Policy, prompt: Any, fields: Any, seed: int) -> list[Chosen]:
        inner = await policy.begin(prompt).answers(2)
        leaves = await asyncio.gather(*(each.say("go on").answers(2) for each in inner))
        return [Chosen(each, 1.0) for each in inner] + [Chosen(each, 2.0) for both in leaves for each in both]


def test_alternatives_are_sampled_together_and_inner_answers_train_in_their_own_rollouts() -> None:
    policy = ByKey()
    first, second = play(Tree(), policy, group_size=12)
    assert policy.most_together >= 4
    assert len(policy.asked) == 12, "two episodes of a group draw differently"
    for played in (first, second):
        assert [each.cohort for each in played.rollouts] == list(Tree.rollouts)
        for leaf in played.rollouts[2:]:
            trained = [turn.role for turn in leaf.turns if leaf.loss_mask_T[turn.start]]
            assert trained == ["assistant"], "its last answer only"
            assert [turn.role for turn in leaf.turns] == ["user", "assistant", "user", "assistant"]
        assert played.rollout.counts == {"tokens_unchosen": 0}
    assert [each.sample_index for each in (*first.rollouts, *second.rollouts)] == [*range(12)]


def test_an_evaluation_takes_the_first_rollout_of_as_many_episodes() -> None:
    found = play(Tree(), ByKey(), group_size=3, only_first=True)
    assert [(each.rollout.sample_index, each.others) for each in found] == [(0, ()), (1, ()), (2, ())]


def test_rewards_of_the_manifest_see_the_last_answer_of_each_rollout() -> None:
    seen: list[tuple[str, int]] = []

    def length(completion: str, prompt: Sequence[Any], fields: Mapping[str, Any]) -> float:
        seen.append((completion, len(prompt)))
        return float(len(completion))

    (played,) = play(Tree(), ByKey(), rewards={"length": length})
    texts = [each.turns[-1].text for each in played.rollouts]
    assert sorted(seen) == sorted(zip(texts, [1, 1, 3, 3, 3, 3], strict=True))
    for rollout, own, text in zip(played.rollouts, [1.0, 1.0, 2.0, 2.0, 2.0, 2.0], texts, strict=True):
        assert rollout.reward_parts == {"environment": own, "length": len(text)}
        assert rollout.reward == own + 0.5 * len(text)


class UntilOver:
    """Two branches, each as long as it may be."""

    rollouts = 2

    async def play(self, policy: Policy, prompt: Any, fields: Any, seed: int) -> list[Chosen]:
        async def grow(branch: Branch) -> Branch:
            while not branch.is_over:
                branch = await branch.say("x").answer()
            assert branch.say("y") is branch
            assert await branch.answers(2) == [branch, branch]
            return branch

        return [Chosen(each) for each in await asyncio.gather(grow(policy.begin(prompt)), grow(policy.begin("b")))]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (EpisodeLimits(turns=3), "length"),
        (EpisodeLimits(turns=99, tokens=9), "length"),
        (EpisodeLimits(turns=99, context=90), "length"),
        (EpisodeLimits(turns=99, seconds=0.0), "deadline"),
    ],
)
def test_limits_reach_every_branch_and_leave_it_to_be_scored(limits: EpisodeLimits, reason: str) -> None:
    policy = ByKey()
    (played,) = play(UntilOver(), policy, limits)
    for rollout in played.rollouts:
        assert (rollout.finish_reason, rollout.reward) == (reason, 0.0)
        turns = sum(turn.role == "assistant" for turn in rollout.turns)
        assert turns == (3 if limits.turns == 3 else turns)
        assert sum(rollout.loss_mask_T) <= (limits.tokens or 99)
        assert len(rollout.token_ids_T) <= limits.context
    assert all(room >= 1 for room in policy.rooms)
    assert bool(policy.asked) == (reason != "deadline")


def test_an_hour_in_the_queue_for_a_process_is_not_the_episodes_time() -> None:
    now = [0.0]

    class Waits(PlayedHere):
        async def play(self, prompt: Any, fields: Any, seed: int) -> None:
            now[0] += 3600.0
            await super().play(prompt, fields, seed)

    limits = EpisodeLimits(turns=3, seconds=60.0)
    (played,) = play(UntilOver(), ByKey(), limits, process=Waits, clock=lambda: now[0])
    assert {each.finish_reason for each in played.rollouts} == {"length"}, "by its turns"
    assert all(each.trains for each in played.rollouts)


def test_an_answer_that_is_cut_off_ends_its_branch() -> None:
    (played,) = play(UntilOver(), ByKey("length"))
    assert [sum(turn.role == "assistant" for turn in each.turns) for each in played.rollouts] == [1, 1]
    assert {each.finish_reason for each in played.rollouts} == {"length"}


class Asks:
    """Asks for too much, or for what cannot be answered."""

    rollouts = 3

    def __init__(self, mode: str) -> None:
        self.mode = mode

    async def play(self, policy: Policy, prompt: Any, fields: Any, seed: int) -> Any:
        branch = await policy.begin(prompt).answer()
        if self.mode == "many":
            await branch.say("x").answers(5000)
        if self.mode == "nothing said":
            await branch.answer()
        if self.mode == "none":
            await branch.say("x").answers(0)
        return [Chosen(branch)] if self.mode == "few" else branch


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("many", "more than 4096 answers"),
        ("nothing said", "nothing was said since the last answer"),
        ("none", "0 answers were asked for"),
        ("few", "play returned 1 rollouts, and `rollouts` says 3"),
        ("other", "play returns a list"),
    ],
)
def test_a_mistake_of_the_environment_masks_the_whole_episode(mode: str, reason: str) -> None:
    (played,) = play(Asks(mode), ByKey())
    assert reason in played.reasons[0]
    assert [each.outcome for each in played.rollouts] == ["crash"] * 3
    assert [each.trains for each in played.rollouts] == [False] * 3
    assert [turn.role for turn in played.rollout.turns] == ["user", "assistant"], "what it had reached can be looked at"


@pytest.mark.parametrize(
    ("rollouts", "cohorts"),
    [(1, ("",)), (3, ("", "", "")), (["a", "b"], ("a", "b")), (0, None), (True, None), ("ab", None), ([1], None)],
)
def test_the_number_of_rollouts_or_their_cohorts_are_declared(rollouts: Any, cohorts: tuple[str, ...] | None) -> None:
    async def asks(self: Any, policy: Any, prompt: Any, fields: Any, seed: Any) -> Any: ...

    declared = type("Declared", (), {"play": asks, "rollouts": rollouts})
    if cohorts is None:
        with pytest.raises(TargetError, match=r"Declared.rollouts is .* up to 1024, or a list with a name for each"):
            _cohorts(declared)
    else:
        assert _cohorts(declared) == cohorts


def test_play_must_be_able_to_wait_and_without_it_an_environment_is_as_before() -> None:
    with pytest.raises(TargetError, match=r"Blocks.play is not `async`"):
        _cohorts(type("Blocks", (), {"play": lambda self: None}))
    assert _cohorts(type("Turns", (), {})) is None


def test_a_group_that_an_episode_does_not_divide_is_refused() -> None:
    check_group_size(12, 6)
    with pytest.raises(ManifestError, match="an episode of the environment gives 6 rollouts, and a group has 8") as bad:
        check_group_size(8, 6)
    assert (bad.value.where, bad.value.fix) == ("spec.algorithm.groupSize", "write a multiple of 6")


BAD = """
    import asyncio, os, time
    from orbit_runtime.environments import Chosen

    class Bad:
        rollouts = 2

        async def play(self, policy, prompt, fields, seed):
            begun = policy.begin(prompt)
            one, other = await begun.answers(2)
            mode = fields["mode"]
            if mode == "leaves":  # an answer that nobody waits for, and a task that never ends
                asyncio.create_task(begun.answer())
                asyncio.create_task(asyncio.sleep(3600))
                await asyncio.sleep(0)
            if mode == "raises":
                raise KeyError("oops")
            if mode == "dies":
                os._exit(3)
            if mode == "hangs":
                time.sleep(3600)
            if mode == "waits":
                await asyncio.sleep(3600)
            if mode == "big":
                one.say("x" * (1 << 21))
                await one.say("x" * (1 << 21)).answer()
            return [Chosen(one, 1.0), Chosen(other, float("nan") if mode == "nan" else 0.0, {"pid": os.getpid()})]
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentPool]:
    folder = tmp_path_factory.mktemp("code")
    (folder / "bad_searches.py").write_text(textwrap.dedent(BAD))
    limits = EnvironmentLimits(step_seconds=1.0, processes=2)
    with EnvironmentPool(EnvironmentTarget("bad_searches:Bad"), limits=limits, search_path=[str(folder)]) as made:
        yield made


def in_process(pool: EnvironmentPool, mode: str, policy: ByKey) -> FinishedEpisode:
    settings = EpisodeSettings("run", Sampling(max_new_tokens=16), EpisodeLimits(), 2, 0, True)
    assert pool.cohorts == ("", "")
    made = Branching(settings, Written(), RewardThreads([]), {}, pool.open_episode, pool.cohorts)
    (episode,) = made.build_episodes([Prompt("p/0", 0, PROMPT.messages, {"mode": mode})], 3)
    return asyncio.run(made.play(episode, policy))


def test_a_good_episode_leaves_its_process_to_the_next_one(pool: EnvironmentPool) -> None:
    pids = set()
    for mode in ("good", "leaves", "good"):
        policy = ByKey()
        played = in_process(pool, mode, policy)
        assert [each.reward for each in played.rollouts] == [1.0, 0.0]
        assert len(policy.asked) == (3 if mode == "leaves" else 2)
        unchosen = sum(map(len, policy.told.values())) - sum(sum(each.loss_mask_T) for each in played.rollouts)
        assert played.rollout.counts["tokens_unchosen"] == unchosen
        assert (unchosen > 0) == (mode == "leaves"), "what nobody waited for was sampled, and is counted"
        pids.add(played.others[0].counts["pid"])
    assert len(pids) == 1


@pytest.mark.parametrize(
    ("mode", "outcome", "reason"),
    [
        ("raises", "crash", "KeyError"),
        ("dies", "crash", "its process exited with 3"),
        ("hangs", "timeout", "no answer within 1 s"),
        ("waits", "timeout", "no answer within 1 s"),
        ("big", "crash", "1,048,576 are allowed"),
        ("nan", "crash", "reward of rollout 1 is nan"),
    ],
)
def test_a_failure_costs_one_episode(pool: EnvironmentPool, mode: str, outcome: str, reason: str) -> None:
    played = in_process(pool, mode, ByKey())
    assert [each.outcome for each in played.rollouts] == [outcome] * 2
    assert reason in played.reasons[0]
    assert (played.stopped is not None) == (outcome == "timeout")
    if mode == "hangs":
        assert played.stopped is not None
        assert "bad_searches.py" in played.stopped.stack


def test_the_failed_processes_were_replaced(pool: EnvironmentPool, tmp_path: Path) -> None:
    assert in_process(pool, "good", ByKey()).rollout.reward == 1.0
