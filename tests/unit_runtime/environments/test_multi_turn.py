"""Episodes of several turns: which tokens train, what ends them, and what their rewards are of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit_runtime.environments.episodes import EpisodeLimits, EpisodeSettings, EpisodeTimeout, FinishedEpisode
from orbit_runtime.environments.turns import MultiTurn, OpponentResponse, ToolUse
from orbit_runtime.types import Completion, FinishReason, Prompt, Sampling
from orbit_runtime.workers.user_code.environment_protocol import EnvironmentFailed, ToolResult
from orbit_runtime.workers.user_code.reward_pool import RewardThreads
from orbit_runtime.workers.user_code.reward_protocol import RewardTarget

END = 3
PROMPT = Prompt("p/0", 0, ({"role": "user", "content": "hi"},), {"answer": "46"})


class Written:
    """A tokenizer of code points, whose template is `[role]text` and the end token."""

    eos_ids = (END,)

    def encode_many(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[list[int]]:
        head = f"tools:{len(tools)}" if tools else ""
        return [[*map(ord, head + self._text(each) + "[assistant]")] for each in conversations]

    def encode_continuation(
        self,
        messages: Sequence[Mapping[str, Any]],
        answered: int,
        last_id: int | None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        assert messages[answered]["role"] == "assistant"
        end = "" if last_id == END else chr(END)
        return [*map(ord, f"{end}{self._text(messages[answered + 1 :])}[assistant]")]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def _text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return "".join(f"[{each['role']}]{each['content']}{chr(END)}" for each in messages)


class Says:
    """A policy that says these things in turn, each a text or a whole completion; it keeps what it was asked."""

    def __init__(self, *answers: str | Completion) -> None:
        self.answers = list(answers)
        self.asked: list[list[int]] = []
        self.rooms: list[int] = []
        self.keys: list[int] = []

    async def sample(self, prompt_ids_T: Sequence[int], sampling: Sampling, *, key: int) -> Completion:
        self.asked.append([*prompt_ids_T])
        self.rooms.append(sampling.max_new_tokens)
        self.keys.append(key)
        answer = self.answers.pop(0)
        return answer if isinstance(answer, Completion) else said(answer)


def said(text: str, finish: FinishReason = "stop", ends: bool = True) -> Completion:
    ids = [*map(ord, text), *([END] if ends and finish == "stop" else [])]
    return Completion(0, ids, [-0.5] * len(ids), [4] * len(ids), finish, text)  # type: ignore[arg-type]


class Plays:
    """An opponent of given answers."""

    def __init__(
        self, *answers: OpponentResponse | EnvironmentFailed, first: OpponentResponse | EnvironmentFailed | None = None
    ) -> None:
        self.answers = list(answers)
        self.first = first
        self.heard: list[str] = []
        self.is_closed = False
        self.counts: Mapping[str, int] = {"tool_calls": 7}

    async def reset(self, prompt: Prompt, seed: int) -> OpponentResponse:
        return self._give(self.first or OpponentResponse(prompt.messages))

    async def step(self, completion: str) -> OpponentResponse:
        self.heard.append(completion)
        return self._give(self.answers.pop(0))

    async def finish(self) -> OpponentResponse:
        return OpponentResponse(reward=0.125, done=True)

    async def close(self) -> None:
        self.is_closed = True

    def _give(self, answer: OpponentResponse | EnvironmentFailed) -> OpponentResponse:
        if isinstance(answer, EnvironmentFailed):
            raise answer
        return answer


def user(text: str, reward: float = 0.0) -> OpponentResponse:
    return OpponentResponse([{"role": "user", "content": text}], reward)


def play(
    policy: Says,
    opponent: Any,
    limits: EpisodeLimits | None = None,
    *,
    gives_reward: bool = True,
    rewards: Mapping[str, Any] | None = None,
    max_new_tokens: int = 256,
    clock: Callable[[], float] = time.monotonic,
) -> FinishedEpisode:
    scorer = RewardThreads([RewardTarget(name, function) for name, function in (rewards or {}).items()])
    sampling = Sampling(max_new_tokens=max_new_tokens)
    settings = EpisodeSettings("run", sampling, limits or EpisodeLimits(), 1, 0, gives_reward, clock)
    environment = MultiTurn(settings, Written(), scorer, dict.fromkeys(rewards or {}, 0.5), lambda: opponent)
    (episode,) = environment.build_episodes([PROMPT], 3)
    return asyncio.run(environment.play(episode, policy))


def test_turns_follow_each_other_and_only_what_was_sampled_trains() -> None:
    policy = Says("ab", "c")
    rollout = play(policy, Plays(user("more"), OpponentResponse(reward=1.0, done=True))).rollout
    text = f"[user]hi{chr(END)}[assistant]ab{chr(END)}[user]more{chr(END)}[assistant]c{chr(END)}"
    assert "".join(map(chr, rollout.token_ids_T)) == text
    trained = [chr(token) for token, flag in zip(rollout.token_ids_T, rollout.loss_mask_T, strict=True) if flag]
    assert trained == ["a", "b", chr(END), "c", chr(END)]
    assert [turn.role for turn in rollout.turns] == ["user", "assistant", "user", "assistant"]
    assert [rollout.token_ids_T[: len(asked)].tolist() for asked in policy.asked] == policy.asked
    assert (rollout.step, rollout.finish_reason, rollout.reward, rollout.outcome) == (3, "stop", 1.0, "value")
    assert rollout.counts == {"tool_calls": 7}
    assert len(set(policy.keys)) == 2


def test_a_system_message_is_a_turn_of_its_own() -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    rollout = play(Says("ab"), Plays(OpponentResponse(done=True), first=OpponentResponse(asked))).rollout
    found = [(turn.role, turn.text) for turn in rollout.turns]
    assert found == [("system", "Be brief."), ("user", "hi"), ("assistant", "ab")]
    spans = [(turn.start, turn.end) for turn in rollout.turns]
    length = len(f"[system]Be brief.{chr(END)}[user]hi{chr(END)}[assistant]")
    assert spans == [(0, 0), (0, length), (length, length + len("ab") + 1)]


def test_a_prompt_that_the_environment_leaves_as_it_is_is_a_turn_with_its_text() -> None:
    rollout = play(Says("ab"), Plays(OpponentResponse(done=True), first=OpponentResponse())).rollout
    assert [(turn.role, turn.text) for turn in rollout.turns] == [("user", "hi"), ("assistant", "ab")]


words = st.text(st.characters(codec="utf-8", exclude_characters=chr(END)), max_size=8)


@given(
    st.lists(st.tuples(words, st.booleans(), words), min_size=1, max_size=5),
    st.sampled_from(["stop", "length"]),
    st.integers(1, 5),
)
def test_masks_cover_exactly_the_sampled_tokens_of_any_conversation(
    turns: list[tuple[str, bool, str]], last: FinishReason, most: int
) -> None:
    """An answer may end by its end token or by a stop string, be empty, be cut off, or be one too many."""
    policy = Says(*(said(text, "stop", ends) for text, ends, _ in turns[:-1]), said(turns[-1][0], last))
    opponent = Plays(*(user(reply) for _, _, reply in turns[:-1]), OpponentResponse(done=True))
    sent = [each if isinstance(each, Completion) else said(each) for each in policy.answers]
    rollout = play(policy, opponent, EpisodeLimits(turns=most)).rollout
    played = sent[: len(policy.asked)]
    spans = [turn for turn in rollout.turns if turn.role == "assistant"]
    expected = [0] * len(rollout.token_ids_T)
    for span, completion in zip(spans, played, strict=True):
        assert rollout.token_ids_T[span.start : span.end] == completion.token_ids_T
        assert rollout.logprobs_T[span.start : span.end] == completion.logprobs_T
        assert rollout.versions_T[span.start : span.end] == completion.versions_T
        expected[span.start : span.end] = [1] * len(completion.token_ids_T)
    assert rollout.loss_mask_T.tolist() == expected
    for token, flag in zip(range(len(expected)), expected, strict=True):
        if not flag:
            assert (rollout.logprobs_T[token], rollout.versions_T[token]) == (0.0, -1)
    assert [turn.end for turn in rollout.turns][:-1] == [turn.start for turn in rollout.turns][1:]
    for asked, span in zip(policy.asked, spans, strict=True):
        assert asked == rollout.token_ids_T[: span.start].tolist(), "what it was asked is what trains"


def test_rewards_of_turns_add_up_and_those_of_the_manifest_see_the_last_answer() -> None:
    seen: list[tuple[str, list[str]]] = []

    def last(completion: str, prompt: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> float:
        seen.append((completion, [str(message["content"]) for message in prompt]))
        return float(completion == fields["answer"])

    opponent = Plays(user("more", 0.25), OpponentResponse(reward=0.5, done=True, parts={"wins": 2.0}))
    rollout = play(Says("ab", "46"), opponent, rewards={"correct": last}).rollout
    assert seen == [("46", ["hi", "ab", "more"])]
    assert rollout.reward_parts == {"environment": 0.75, "correct": 1.0}
    assert rollout.reward == 0.75 + 0.5
    assert rollout.counts == {"tool_calls": 7, "wins": 2.0}


@pytest.mark.parametrize(
    ("limits", "max_new", "rooms", "finish"),
    [
        (EpisodeLimits(turns=2), 256, [256, 256], "length"),
        (EpisodeLimits(tokens=7), 256, [7, 4, 1], "length"),
        (EpisodeLimits(context=60), 5, [5, 5], "length"),
        (EpisodeLimits(seconds=1e-9), 256, [], "deadline"),
    ],
)
def test_a_limit_ends_an_episode_that_is_then_scored(
    limits: EpisodeLimits, max_new: int, rooms: list[int], finish: str
) -> None:
    policy = Says("ab", "cd", said("e", ends=False), "f")
    opponent = Plays(*[user("more", 0.5)] * 4)
    rollout = play(policy, opponent, limits, max_new_tokens=max_new).rollout
    assert policy.rooms == rooms
    assert rollout.finish_reason == finish
    assert rollout.reward == 0.5 * len(rooms) + 0.125, "with what the environment gives at the end"
    assert opponent.is_closed


def test_an_observation_beyond_the_context_ends_the_episode_and_is_kept_only_as_far_as_the_context() -> None:
    """Otherwise the trainer computes thousands of tokens that no answer follows, and runs out of memory."""
    limits = EpisodeLimits(context=60)
    policy = Says("ab", "cd")
    rollout = play(policy, Plays(user("more " * 5000, 0.5)), limits, max_new_tokens=5).rollout
    assert (len(policy.asked), len(rollout.token_ids_T), rollout.finish_reason) == (1, 60, "length")
    assert sum(rollout.loss_mask_T) > 0
    assert rollout.turns[-1].end == 60
    assert rollout.reward == 0.5 + 0.125, "it is scored as it is"


class Slow(Plays):
    """Each reset and each step takes so many seconds of a clock that is told."""

    def __init__(self, resets: float, steps: float) -> None:
        super().__init__(*[user("more", 0.5)] * 2, OpponentResponse(reward=1.0, done=True))
        self.now, self.resets, self.steps = 0.0, resets, steps

    async def reset(self, prompt: Prompt, seed: int) -> OpponentResponse:
        self.now += self.resets
        return await super().reset(prompt, seed)

    async def step(self, completion: str) -> OpponentResponse:
        self.now += self.steps
        return await super().step(completion)


def test_an_hour_in_the_queue_for_a_process_is_not_the_episodes_time() -> None:
    """With more episodes than processes, an episode's reset waits until others have ended."""
    limits = EpisodeLimits(seconds=60.0)
    waited = Slow(resets=3600.0, steps=29.0)
    rollout = play(Says("a", "b", "c"), waited, limits, clock=lambda: waited.now).rollout
    assert (rollout.finish_reason, rollout.reward) == ("stop", 2.0)
    late = Slow(resets=3600.0, steps=30.0)
    rollout = play(Says("a", "b", "c"), late, limits, clock=lambda: late.now).rollout
    assert (rollout.finish_reason, rollout.reward) == ("deadline", 1.125)


def test_an_answer_that_was_cut_off_is_answered_by_nothing() -> None:
    opponent = Plays()
    rollout = play(Says(said("ab", "length")), opponent).rollout
    assert (opponent.heard, rollout.finish_reason, rollout.reward) == ([], "length", 0.125)


def test_an_environment_that_ends_at_once_trains_nothing() -> None:
    rollout = play(Says(), Plays(first=OpponentResponse(PROMPT.messages, reward=1.0, done=True))).rollout
    assert (rollout.reward, rollout.trains) == (1.0, False)


@pytest.mark.parametrize("when", ["reset", "step", "nothing to say"])
def test_an_environment_that_fails_loses_its_episode_without_a_score(when: str) -> None:
    failure = EnvironmentFailed("timeout", "no answer within 1 s", "in act")
    opponent = {
        "reset": Plays(first=failure),
        "step": Plays(failure),
        "nothing to say": Plays(OpponentResponse()),
    }[when]
    played = play(Says("ab"), opponent, rewards={"one": lambda *_: 1.0})
    assert played.rollout.reward is None
    assert played.rollout.outcome == ("crash" if when == "nothing to say" else "timeout")
    assert played.rollout.reward_parts == {"environment": None, "one": None}
    assert not played.rollout.trains
    assert len(played.reasons) == 1
    evidence = EpisodeTimeout("environment", "no answer within 1 s", "in act")
    assert played.stopped == (None if when == "nothing to say" else evidence), "a crash is none that stopped"
    assert opponent.is_closed


class FakePool:
    """Tools that answer at once."""

    tools = ({"type": "function", "function": {"name": "add"}},)

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(str(arguments["a"] + 1))


def test_calls_are_made_and_errors_are_read_by_the_policy_and_counted() -> None:
    one = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    wrong = '<tool_call>{"name": "ad", "arguments": {}}</tool_call>'
    policy = Says(one + wrong, one, "2")
    rollout = play(policy, ToolUse(FakePool()), gives_reward=False, rewards={"one": lambda *_: 1.0}).rollout  # type: ignore[arg-type]
    texts = [turn.text for turn in rollout.turns if turn.role == "tool"]
    assert texts == ["2\nError: no tool is called 'ad'; there are: add", "2"]
    assert rollout.counts == {"tool_calls": 3, "tool_errors": 1}
    assert (rollout.reward, rollout.reward_parts) == (0.5, {"one": 1.0})
    assert "".join(map(chr, policy.asked[0])).startswith("tools:1")
