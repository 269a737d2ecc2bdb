"""One episode: what it is, its tokens while it is played, its scores, and the rollouts that it becomes.

Belongs here: an episode's limits, records, columns of tokens that are consistent by construction, and scoring calls of
many episodes that go to the reward workers together. Does not belong here: whose turn it is (`turns`, `branching`),
running rewards (`workers`).

Legend: `_P` prompts, `_T` tokens.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Protocol

from orbit_runtime.errors import OrbitError
from orbit_runtime.types import (
    FLAGS,
    FLOATS,
    TOKENS,
    Completion,
    FinishReason,
    Outcome,
    Prompt,
    Rollout,
    RoutedExperts,
    Sampling,
    TokenSource,
    Turn,
)
from orbit_runtime.workers.user_code.reward_protocol import RewardCall, RewardResult, RewardScorer

_NO_TOKENS: array[int] = array(TOKENS)
_NO_FLAGS: array[int] = array(FLAGS)
_NO_FLOATS: array[float] = array(FLOATS)
_NO_LOGPROB: array[float] = array(FLOATS, [0.0])
_NO_VERSION: array[int] = array(TOKENS, [-1])
"""Copied and repeated: in a run, audit hooks of imported packages make each new `array` several times as slow."""


class Trajectory:
    """Grows by completions, which train, and by other tokens, which do not. Nothing in it is ever encoded again.

    Example: after `add_given([("user", "hi")], [5, 6])` and a completion of `[7]`, `loss_mask_T` is `[0, 0, 1]`.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.finish_reason: FinishReason = "stop"
        self.routed_experts: RoutedExperts | None = None
        self.token_ids_T: array[int] = _NO_TOKENS[:]
        self.loss_mask_T: array[int] = _NO_FLAGS[:]
        self.logprobs_T: array[float] = _NO_FLOATS[:]
        self.versions_T: array[int] = _NO_TOKENS[:]

    def add_given(self, given: Sequence[tuple[str, str]], ids_T: Sequence[int]) -> None:
        """Adds tokens of the prompt, the environment or the template.

        Args: given: role and text of each turn; the last one has all the tokens, since the template may mix them.
        """
        start, count = len(self.token_ids_T), len(ids_T)
        self.token_ids_T.extend(ids_T)
        self.loss_mask_T.frombytes(bytes(count))
        self.logprobs_T.extend(_NO_LOGPROB * count)
        self.versions_T.extend(_NO_VERSION * count)
        self.turns += [Turn(role, start, start, text) for role, text in given[:-1]]
        role, text = given[-1]
        self.turns.append(Turn(role, start, start + count, text))

    def add_answer(self, completion: Completion) -> None:
        """Adds the policy's completion of everything before it."""
        start, count = len(self.token_ids_T), len(completion.token_ids_T)
        self.token_ids_T.extend(completion.token_ids_T)
        self.loss_mask_T.frombytes(b"\1" * count)
        self.logprobs_T.extend(completion.logprobs_T)
        self.versions_T.extend(completion.versions_T)
        self.turns.append(Turn("assistant", start, start + count, completion.text))
        self._end_with(completion)

    def add_repeated(self, completion: Completion) -> None:
        """Adds a completion that another rollout of the episode trains: here it is given, like a prompt."""
        self.add_given([("assistant", completion.text)], completion.token_ids_T)
        self._end_with(completion)

    def _end_with(self, completion: Completion) -> None:
        self.finish_reason = completion.finish_reason
        # Covers everything before it as well.
        self.routed_experts = completion.routed_experts

    @property
    def sampled(self) -> int:
        """Tokens that the policy chose."""
        return self.loss_mask_T.tobytes().count(1)


FAILED: tuple[Outcome, ...] = ("timeout", "crash")
UNCHOSEN = "tokens_unchosen"
"""Counts, with the first rollout of an episode, the tokens that were sampled for it and train in none of its rollouts.
"""


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode to be played."""

    step: int
    """The step that its rollout trains in."""
    prompt: Prompt
    sample_index: int
    """Index of its (first) rollout within the prompt's group."""
    prompt_ids_T: tuple[int, ...]
    """Empty if the environment provides the first message."""


@dataclass(frozen=True, slots=True)
class EpisodeTimeout:
    """Evidence of an episode that gave no result within its stage's time limit, set so that slow code still answers."""

    stage: str
    """`environment`, or `reward` and its name."""
    reason: str
    stack: str
    """Stack of its process before it was ended; empty if it could not report one."""


@dataclass(frozen=True, slots=True)
class FinishedEpisode:
    """A finished, scored episode."""

    rollout: Rollout
    """The (first) rollout."""
    reasons: tuple[str, ...] = ()
    """Why rewards, or the environment, timed out or crashed."""
    stopped: EpisodeTimeout | None = None
    """The first of these timeouts."""
    others: tuple[Rollout, ...] = ()
    """The episode's other rollouts, which an environment that asks the policy itself chose."""

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return (self.rollout, *self.others)


def sampled_tokens(rollout: Rollout) -> int:
    """Tokens that were sampled for it: those that train in it, and, with its episode's first, the unchosen ones."""
    return rollout.loss_mask_T.tobytes().count(1) + round(rollout.counts.get(UNCHOSEN, 0))


class Environment(Protocol):
    """Builds episodes from prompts and plays them, any number at a time, in one event loop."""

    def build_episodes(self, prompts_P: Sequence[Prompt], step: int) -> list[Episode]:
        """Episodes for all samples of each prompt's group, in the prompts' order."""

    async def play(self, episode: Episode, tokens: TokenSource) -> FinishedEpisode: ...


@dataclass(frozen=True, slots=True)
class Track:
    """A future rollout: tokens, their scores, and counts."""

    tokens: Trajectory
    results: Sequence[RewardResult]
    """One for each reward, in the order of their weights."""
    counts: Mapping[str, float] = field(default_factory=dict)
    cohort: str = ""


def build_finished(
    run: str,
    episode: Episode,
    tracks: Sequence[Track],
    weights: Mapping[str, float],
    stopped: EpisodeTimeout | None = None,
) -> FinishedEpisode:
    """
    Args:
        tracks: one for each rollout of the episode.
        weights: a reward's name to its factor in the sum.
        stopped: evidence of the environment's timeout.
    """
    rollouts = [_build_rollout(run, episode, index, track, weights) for index, track in enumerate(tracks)]
    results = [result for track in tracks for result in track.results]
    reasons = tuple(dict.fromkeys(result.reason for result in results if result.outcome in FAILED))
    if not reasons and any(rollout.outcome in FAILED for rollout in rollouts):
        reasons = ("the weighted sum of the rewards is not finite",)
    late = [
        EpisodeTimeout(f"reward {name}", each.reason, each.stack)
        for track in tracks
        for name, each in zip(weights, track.results, strict=True)
        if each.outcome == "timeout"
    ]
    return FinishedEpisode(rollouts[0], reasons, stopped or next(iter(late), None), tuple(rollouts[1:]))


def _build_rollout(run: str, episode: Episode, index: int, track: Track, weights: Mapping[str, float]) -> Rollout:
    reward, outcome = combine(track.results, list(weights.values()))
    tokens = track.tokens
    return Rollout(
        run=run,
        step=episode.step,
        prompt_id=episode.prompt.prompt_id,
        sample_index=episode.sample_index + index,
        turns=tuple(tokens.turns),
        token_ids_T=tokens.token_ids_T,
        loss_mask_T=tokens.loss_mask_T,
        logprobs_T=tokens.logprobs_T,
        versions_T=tokens.versions_T,
        reward=reward,
        outcome=outcome,
        reward_parts={name: result.value for name, result in zip(weights, track.results, strict=True)},
        finish_reason=tokens.finish_reason,
        routed_experts=tokens.routed_experts,
        counts=track.counts,
        cohort=track.cohort,
    )


def combine(results: Sequence[RewardResult], weights: Sequence[float]) -> tuple[float | None, Outcome]:
    """Weighted sum of a rollout's rewards. One failed part fails it; one wrong part makes it wrong, but it trains.

    A sum that overflows is a crash, like an infinite reward.

    Example: values 1.0 and 0.5 with weights 1.0 and 0.2 give `(1.1, "value")`.
    """
    outcomes = [result.outcome for result in results]
    for failed in FAILED:
        if failed in outcomes:
            return None, failed
    total = sum(weight * (result.value or 0.0) for result, weight in zip(results, weights, strict=True))
    if not math.isfinite(total):
        return None, "crash"
    return total, "wrong" if "wrong" in outcomes else "value"


TOGETHER, TOGETHER_TURNS, TOGETHER_SECONDS = 16, 5, 0.02
"""So many scoring calls are handed over at once; fewer wait so many turns of the event loop for others, or so long: a
hand-over of its own takes 0.3 ms from the engine, whose thread shares the interpreter. An engine in this process takes
a step in each turn; once it has none left, turns take no time."""


class Scoring:
    """Collects scoring calls of many concurrent episodes of one event loop."""

    def __init__(self, scorer: RewardScorer) -> None:
        self._scorer = scorer
        self._waiting: list[tuple[Sequence[RewardCall], asyncio.Future[list[RewardResult]]]] = []

    async def score(self, calls: Sequence[RewardCall]) -> list[RewardResult]:
        """Results in the order of the calls. Raises the error that ended the scorer."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._gather, TOGETHER_TURNS, loop.time() + TOGETHER_SECONDS)
        future: asyncio.Future[list[RewardResult]] = loop.create_future()
        self._waiting.append((calls, future))
        return await future

    def _gather(self, turns: int, until: float) -> None:
        loop = asyncio.get_running_loop()
        if turns and len(self._waiting) < TOGETHER and loop.time() < until:
            loop.call_soon(self._gather, turns - 1, until)
        else:
            self._submit()

    def _submit(self) -> None:
        asked, self._waiting = self._waiting, []
        try:
            submitted = self._scorer.submit([call for calls, _ in asked for call in calls])
        except OrbitError as error:
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)
            return
        submitted.add_done_callback(partial(_bring_back, asyncio.get_running_loop(), asked))


_Asked = Sequence[tuple[Sequence[RewardCall], asyncio.Future[list[RewardResult]]]]


def _bring_back(loop: asyncio.AbstractEventLoop, asked: _Asked, submitted: Future[list[RewardResult]]) -> None:
    """Runs in the scorer's thread. If the event loop has closed meanwhile, nothing waits for the rewards."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(_hand_out, asked, submitted)


def _hand_out(asked: _Asked, submitted: Future[list[RewardResult]]) -> None:
    error = submitted.exception()
    results = iter(()) if error else iter(submitted.result())
    for calls, future in asked:
        mine = [next(results) for _ in calls] if not error else []
        if future.done():
            # Its episode was cancelled meanwhile.
            continue
        if error:
            future.set_exception(error)
        else:
            future.set_result(mine)


OWN_PART = "environment"
"""Name of the environment's own reward among the parts of a reward."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of one episode; the first one reached ends it, and it is scored as it is."""

    turns: int = 8
    """Completions of the policy; of an episode with branches, those along one branch."""
    tokens: int | None = None
    """Tokens that the policy samples, also along one branch; None: as many as the model's context allows."""
    context: int = 4096
    """Maximum sequence length of the model."""
    seconds: float = 3600.0
    """Limit on the time since its environment has a process. Checked between turns: a turn in progress is finished."""


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """Settings that all episodes of a run share."""

    run: str
    sampling: Sampling
    limits: EpisodeLimits
    group_size: int
    seed: int
    gives_reward: bool
    """Whether the environment's own rewards count, as the part `environment`."""
    clock: Callable[[], float] = time.monotonic
    """Seconds from any origin."""

    def room(self, length: int, sampled: int) -> int:
        """Tokens that the next completion may have. Args: length: tokens so far; sampled: the policy's among them."""
        room = min(self.sampling.max_new_tokens, self.limits.context - length)
        return room if self.limits.tokens is None else min(room, self.limits.tokens - sampled)

    def limit_reached(self, room: int, turns: int, seconds: float) -> FinishReason | None:
        """Why an episode of so many turns must end before its next one; None if it need not."""
        if room < 1 or turns >= self.limits.turns:
            return "length"
        return "deadline" if seconds >= self.limits.seconds else None


def build_calls(names: Iterable[str], prompt: Prompt, messages: Sequence[Mapping[str, Any]]) -> list[RewardCall]:
    """The manifest's rewards see the last message of the policy as completion, and everything before as prompt."""
    is_answered = bool(messages) and messages[-1]["role"] == "assistant"
    completion = _content(messages[-1]) if is_answered else ""
    before = messages[:-1] if is_answered else messages
    return [RewardCall(name, completion, before, prompt.fields) for name in names]


def given_turns(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Role and text of messages that the policy reads together: a system message is a turn, the others are one."""
    runs = [[*run] for _, run in groupby(messages, lambda each: each["role"] == "system")]
    return [(str(run[-1]["role"]), "\n".join(map(_content, run))) for run in runs] or [("user", "")]


def _content(message: Mapping[str, Any]) -> str:
    """The text of a message; of a list of parts, the text parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part["text"]) for part in content if part.get("type") == "text")
