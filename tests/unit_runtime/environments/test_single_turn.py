"""From prompts to requests, from completions and scores to rollouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from orbit_runtime.environments.episodes import FinishedEpisode, combine
from orbit_runtime.environments.rewards.math_answer import math_answer
from orbit_runtime.environments.rewards.text import exact_match
from orbit_runtime.environments.turns import SingleTurn
from orbit_runtime.errors import RewardsFailingError
from orbit_runtime.loop.collect import build_groups
from orbit_runtime.types import Completion, Prompt, Sampling
from orbit_runtime.workers.user_code.reward_pool import RewardPool, RewardThreads
from orbit_runtime.workers.user_code.reward_protocol import RewardCall, RewardResult, RewardTarget, WrongAnswer

TESTS = str(Path(__file__).resolve().parents[2])


class Letters:
    """A tokenizer whose ids are code points."""

    eos_ids = (0,)

    def encode_many(self, conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[list[int]]:
        return [[ord(letter) for letter in messages[-1]["content"]] for messages in conversations]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


PROMPTS = [Prompt(f"p/{name}", 0, ({"role": "user", "content": name},), {"answer": name}) for name in ("ab", "c")]


def build(seed: int = 0) -> SingleTurn:
    def crash_on_x(completion: str, prompt: object, fields: Mapping[str, str]) -> float:
        if completion == "x":
            raise RuntimeError("no x")
        return float(completion == fields["answer"])

    scorer = RewardThreads([RewardTarget("correct", crash_on_x), RewardTarget("match", exact_match)])
    return SingleTurn("run", Letters(), scorer, {"correct": 1.0, "match": 0.5}, Sampling(), 2, seed)


class Tokens:
    """Answers each episode with its text, in the order that the test says."""

    def __init__(self, texts: Sequence[str] = (), order: Sequence[int] = ()) -> None:
        self.texts, self.order = texts, list(order)
        self.asked: list[tuple[tuple[int, ...], int]] = []
        self.turns = [asyncio.Event() for _ in texts]

    async def sample(self, prompt_ids_T: Sequence[int], sampling: Sampling, *, key: int) -> Completion:
        number = len(self.asked)
        self.asked.append((tuple(prompt_ids_T), key))
        text = self.texts[number] if self.texts else ""
        if self.order:
            if number == self.order[0]:
                self.turns[number].set()
            await self.turns[number].wait()
            after = self.order[self.order.index(number) + 1 :]
            if after:
                self.turns[after[0]].set()
        return Completion(number, tuple(map(ord, text)), (-0.5,) * len(text), (3,) * len(text), "stop", text)


def play(environment: SingleTurn, prompts: Sequence[Prompt], tokens: Tokens) -> list[FinishedEpisode]:
    async def all_of_them() -> list[FinishedEpisode]:
        episodes = environment.build_episodes(prompts, 7)
        return await asyncio.gather(*(environment.play(each, tokens) for each in episodes))

    return asyncio.run(all_of_them())


def test_requests_name_their_random_stream_by_what_they_are() -> None:
    def asked(environment: SingleTurn, prompts: Sequence[Prompt]) -> list[tuple[tuple[int, ...], int]]:
        tokens = Tokens()
        play(environment, prompts, tokens)
        return tokens.asked

    first = asked(build(), PROMPTS)
    assert [prompt for prompt, _ in first] == [(97, 98), (97, 98), (99,), (99,)]
    keys = [key for _, key in first]
    assert len(set(keys)) == 4
    assert keys[2:] == [key for _, key in asked(build(), PROMPTS[1:])]
    again = [Prompt(p.prompt_id, 1, p.messages, p.fields) for p in PROMPTS]
    assert not set(keys) & {key for _, key in asked(build(), again)}
    assert not set(keys) & {key for _, key in asked(build(seed=1), PROMPTS)}


def test_groups_come_back_in_order_whatever_finished_first() -> None:
    environment = build()
    played = play(environment, PROMPTS, Tokens(["ab", "no", "x", "c"], order=(3, 1, 0, 2)))
    groups = build_groups(PROMPTS, [each.rollout for each in played])
    reasons = [reason for each in played for reason in each.reasons]
    rewards = [[rollout.reward for rollout in group.rollouts_G] for group in groups]
    assert rewards == [[1.5, 0.0], [None, 1.5]]
    assert len(reasons) == 1
    assert "no x" in reasons[0]
    first = groups[0].rollouts_G[0]
    assert first.step == 7
    assert first.loss_mask_T.tolist() == [0, 0, 1, 1]
    assert first.versions_T.tolist() == [-1, -1, 3, 3]
    assert first.reward_parts == {"correct": 1.0, "match": 1.0}
    assert [turn.role for turn in first.turns] == ["user", "assistant"]
    failed = groups[1].rollouts_G[0]
    assert (failed.outcome, failed.reward) == ("crash", None)


def test_what_the_policy_reads_is_told_in_turns() -> None:
    prompt = Prompt("p", 0, ({"role": "system", "content": "Be brief."}, *PROMPTS[0].messages), PROMPTS[0].fields)
    rollout = play(build(), [prompt], Tokens())[0].rollout
    assert [turn.role for turn in rollout.turns] == ["system", "user", "assistant"]
    assert [turn.text for turn in rollout.turns[:2]] == ["Be brief.", "ab"]


def test_one_failed_part_fails_the_rollout_and_a_wrong_part_trains() -> None:
    value, wrong = RewardResult("value", 1.0), RewardResult("wrong", 0.0)
    timeout, crash = RewardResult("timeout", None), RewardResult("crash", None)
    assert combine([value, value], [1.0, 0.2]) == (1.2, "value")
    assert combine([value, wrong], [1.0, 0.2]) == (1.0, "wrong")
    assert combine([crash, timeout, value], [1, 1, 1]) == (None, "timeout")
    assert combine([crash, wrong], [1, 1]) == (None, "crash")


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [("46", "46", 1.0), (" 46\n", "46", 1.0), ("46", 46, 1.0), ("47", "46", 0.0), ("", "46", 0.0)],
)
def test_exact_match_compares_text_without_outer_space(completion: str, answer: object, reward: float) -> None:
    assert exact_match(completion, [], {"answer": answer}) == reward


def test_math_compares_values_and_tells_no_answer_from_a_wrong_one() -> None:
    assert math_answer("so it is $\\frac{1}{2}$", [], {"answer": "0.5"}) == 1.0
    assert math_answer("the answer is \\boxed{3}", [], {"answer": "4"}) == 0.0
    with pytest.raises(WrongAnswer):
        math_answer("I do not know", [], {"answer": "4"})


def test_of_a_worked_solution_its_result_counts() -> None:
    fields = {"answer": "48/2 = <<48/2=24>>24 in May, 24+976 = 1,000 in all.\n#### 1,000"}
    assert math_answer("so 1000.", [], fields) == 1.0
    assert math_answer("so 24", [], fields) == 0.0


def test_a_column_that_is_no_mathematics_is_a_crash_and_not_a_wrong_answer() -> None:
    with pytest.raises(ValueError, match="'answer' holds no mathematical expression"):
        math_answer("4", [], {"answer": ""})


def test_a_stop_does_not_wait_for_slow_rewards(caplog: pytest.LogCaptureFixture) -> None:
    slow = RewardTarget("slow", "fakes.bad_rewards:by_text", {}, timeout_seconds=600.0)
    with RewardPool([slow], num_workers=1, search_path=[TESTS]) as pool:
        environment = SingleTurn("run", Letters(), pool, {"slow": 1.0}, Sampling(), 1, 0)
        (episode,) = environment.build_episodes(PROMPTS[:1], 1)
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(environment.play(episode, Tokens(["hang"])), 0.2))
        pool.close()
        assert time.monotonic() - started < 2.0
    assert not caplog.records, "what ends after its event loop disturbs nobody"


def test_what_ends_the_scorer_reaches_every_episode_that_waits_for_it() -> None:
    class Broken:
        def submit(self, calls: Sequence[RewardCall]) -> Future[list[RewardResult]]:
            raise RewardsFailingError("they keep ending")

    environment = SingleTurn("run", Letters(), Broken(), {"one": 1.0}, Sampling(), 2, 0)  # type: ignore[arg-type]
    with pytest.raises(RewardsFailingError, match="keep ending"):
        play(environment, PROMPTS, Tokens(["a", "b", "c", "d"]))
