"""Episodes of one turn, and of several, in which tools or an environment answer the policy.

Belongs here: from prompts to episodes, the order of turns, the opponents, and from completions and scores to rollouts.
Does not belong here: sampling (`rollout`), processes (`workers`), which step an episode belongs to (`loop`).

Token in, token out: sampled tokens enter the next prompt unchanged. Only the text between them, which the chat template
writes, is encoded.

Legend: `_P` prompts, `_T` tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from orbit_runtime.environments.episodes import (
    OWN_PART,
    Episode,
    EpisodeSettings,
    EpisodeTimeout,
    FinishedEpisode,
    Scoring,
    Track,
    Trajectory,
    build_calls,
    build_finished,
    given_turns,
)
from orbit_runtime.environments.tool_calls import ToolCall, parameter_schemas, parse_tool_calls
from orbit_runtime.model_info.calls.formats import FORMATS
from orbit_runtime.seeds import stream_key
from orbit_runtime.types import Prompt, Sampling, Tokenizer, TokenSource
from orbit_runtime.workers.user_code.environment_pool import EnvironmentPool, EpisodeProcess
from orbit_runtime.workers.user_code.environment_protocol import EnvironmentFailed, ToolResult
from orbit_runtime.workers.user_code.reward_protocol import RewardCall, RewardResult, RewardScorer


class SingleTurn:
    """Builds episodes from prompts and plays them, any number at a time, in one event loop."""

    def __init__(
        self,
        run: str,
        tokenizer: Tokenizer,
        scorer: RewardScorer,
        weights: Mapping[str, float],
        sampling: Sampling,
        group_size: int,
        seed: int,
    ) -> None:
        self._run = run
        self._tokenizer = tokenizer
        self._scoring = Scoring(scorer)
        self._weights = dict(weights)
        """Reward name → its factor in the sum, in the manifest's order."""
        self._sampling = sampling
        self._group_size = group_size
        self._seed = seed

    def build_episodes(self, prompts_P: Sequence[Prompt], step: int) -> list[Episode]:
        """`group_size` episodes per prompt, in the prompts' order."""
        encoded = self._tokenizer.encode_many([prompt.messages for prompt in prompts_P])
        return [
            Episode(step, prompt, sample, tuple(prompt_ids))
            for prompt, prompt_ids in zip(prompts_P, encoded, strict=True)
            for sample in range(self._group_size)
        ]

    async def play(self, episode: Episode, tokens: TokenSource) -> FinishedEpisode:
        """Samples the episode's completion and has it scored."""
        prompt = episode.prompt
        key = stream_key(self._seed, "sample", prompt.prompt_id, prompt.visit, episode.sample_index, 0)
        completion = await tokens.sample(episode.prompt_ids_T, self._sampling, key=key)
        results = await self._scoring.score(
            [RewardCall(name, completion.text, prompt.messages, prompt.fields) for name in self._weights]
        )
        track = Trajectory()
        track.add_given(given_turns(prompt.messages), episode.prompt_ids_T)
        track.add_answer(completion)
        return build_finished(self._run, episode, [Track(track, results)], self._weights)


@dataclass(frozen=True, slots=True)
class OpponentResponse:
    """The opponent's response to a completion of the policy."""

    messages: Sequence[Mapping[str, Any]] = ()
    reward: float = 0.0
    done: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas for the chat template; read from `reset` only."""


class Opponent(Protocol):
    """The other side of an episode, which responds to the policy. Every method may raise EnvironmentFailed."""

    async def reset(self, prompt: Prompt, seed: int) -> OpponentResponse:
        """The first message that the policy reads."""

    async def step(self, completion: str) -> OpponentResponse: ...

    async def finish(self) -> OpponentResponse:
        """Called when a limit has ended the episode; returns its final reward."""

    async def close(self) -> None: ...

    @property
    def counts(self) -> Mapping[str, int]:
        """Numbers of tool calls and of failed ones; empty without tools."""


@dataclass
class _State:
    """An episode in progress."""

    track: Trajectory
    messages: list[Mapping[str, Any]]
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)


class MultiTurn:
    """Builds episodes from prompts and plays them, any number at a time, in one event loop."""

    def __init__(
        self,
        settings: EpisodeSettings,
        tokenizer: Tokenizer,
        scorer: RewardScorer,
        weights: Mapping[str, float],
        opponent: Callable[[], Opponent],
    ) -> None:
        """Args: opponent: makes a new opponent for each episode."""
        self._settings = settings
        self._tokenizer = tokenizer
        self._scoring = Scoring(scorer)
        self._weights = dict(weights)
        """Reward name → its factor in the sum, in the manifest's order."""
        self._opponent = opponent
        self._all_weights = {**({OWN_PART: 1.0} if settings.gives_reward else {}), **self._weights}

    def build_episodes(self, prompts_P: Sequence[Prompt], step: int) -> list[Episode]:
        """`group_size` episodes per prompt, in the prompts' order. Their tokens are known once they are played."""
        return [
            Episode(step, prompt, sample, ()) for prompt in prompts_P for sample in range(self._settings.group_size)
        ]

    async def play(self, episode: Episode, tokens: TokenSource) -> FinishedEpisode:
        """Plays an episode to its end and has it scored. A failing opponent ends it without a score."""
        state = _State(Trajectory(), [])
        opponent = self._opponent()
        lost: RewardResult | None = None
        stopped: EpisodeTimeout | None = None
        try:
            await self._converse(episode, state, opponent, tokens)
        except EnvironmentFailed as failure:
            lost = RewardResult(failure.outcome, None, failure.reason)
            if failure.outcome == "timeout":
                stopped = EpisodeTimeout("environment", failure.reason, failure.stack)
        finally:
            await opponent.close()
        results = [lost] * len(self._all_weights) if lost else await self._score(episode.prompt, state)
        track = Track(state.track, results, {**opponent.counts, **state.parts})
        return build_finished(self._settings.run, episode, [track], self._all_weights, stopped)

    async def _converse(self, episode: Episode, state: _State, opponent: Opponent, tokens: TokenSource) -> None:
        prompt, settings, track = episode.prompt, self._settings, state.track
        keys = (settings.seed, "sample", prompt.prompt_id, prompt.visit, episode.sample_index)
        # All episodes of a group start with the same seed, because their rewards are compared.
        first = await opponent.reset(prompt, stream_key(settings.seed, "environment", prompt.prompt_id, prompt.visit))
        # Not before: with more episodes than processes, it may have waited for one as long as others played.
        started = settings.clock()
        self._count(state, first)
        state.messages += first.messages or prompt.messages
        (ids,) = self._tokenizer.encode_many([state.messages], tools=first.tools)
        self._add_given(state, state.messages, ids)
        turn, is_done = 0, first.done
        while not is_done:
            room = settings.room(len(track.token_ids_T), track.sampled)
            ended = settings.limit_reached(room, turn, settings.clock() - started)
            if ended is not None:
                track.finish_reason = ended
                self._count(state, await opponent.finish())
                return
            completion = await tokens.sample(
                track.token_ids_T, replace(settings.sampling, max_new_tokens=room), key=stream_key(*keys, turn)
            )
            track.add_answer(completion)
            state.messages.append({"role": "assistant", "content": completion.text})
            turn += 1
            if completion.finish_reason != "stop":
                # The completion is cut off, so there is nothing complete to respond to.
                self._count(state, await opponent.finish())
                return
            answered = await opponent.step(completion.text)
            self._count(state, answered)
            is_done = answered.done
            if not is_done:
                self._append(state, answered.messages, first.tools)

    def _append(self, state: _State, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
        if not messages:
            raise EnvironmentFailed("crash", "the environment returned no messages, and is not done")
        last = len(state.messages) - 1
        state.messages += messages
        last_id = state.track.token_ids_T[-1] if state.track.token_ids_T else None
        ids = self._tokenizer.encode_continuation(state.messages, last, last_id, tools=tools)
        self._add_given(state, messages, ids)

    def _add_given(self, state: _State, messages: Sequence[Mapping[str, Any]], ids_T: Sequence[int]) -> None:
        """Adds what the policy reads next, up to the model's context: the rest has no answer after it, and would only
        be computed by the trainer."""
        room = max(0, self._settings.limits.context - len(state.track.token_ids_T))
        state.track.add_given(given_turns(messages), ids_T[:room])

    def _count(self, state: _State, answered: OpponentResponse) -> None:
        state.reward += answered.reward
        state.parts |= answered.parts

    async def _score(self, prompt: Prompt, state: _State) -> list[RewardResult]:
        calls = build_calls(self._weights, prompt, state.messages)
        results = await self._scoring.score(calls) if calls else []
        return [RewardResult("value", state.reward), *results] if self._settings.gives_reward else results


class ToolUse:
    """Makes all calls of a completion at once; a completion without calls ends the episode.

    A call that fails or cannot be made returns an error for the policy to read.
    """

    def __init__(self, pool: EnvironmentPool, call_format: str = "") -> None:
        """Args: call_format: name of the format in which the model's template writes calls; empty if unknown."""
        self._pool = pool
        self._schemas = parameter_schemas(pool.tools)
        self._own = FORMATS.get(call_format)
        self._calls = 0
        self._errors = 0

    async def reset(self, prompt: Prompt, seed: int) -> OpponentResponse:
        return OpponentResponse(prompt.messages, tools=self._pool.tools)

    async def step(self, completion: str) -> OpponentResponse:
        calls = parse_tool_calls(completion, self._schemas, self._own)
        results = await asyncio.gather(*(self._make(call) for call in calls))
        self._calls += len(calls)
        self._errors += sum(result.is_error for result in results)
        messages: list[Mapping[str, Any]] = [
            {
                "role": "tool",
                "name": call.name,
                "content": result.text,
                **({"tool_call_id": call.id} if call.id else {}),
            }
            for call, result in zip(calls, results, strict=True)
        ]
        return OpponentResponse(messages, done=not calls)

    async def finish(self) -> OpponentResponse:
        return OpponentResponse(done=True)

    async def close(self) -> None: ...

    @property
    def counts(self) -> Mapping[str, int]:
        return {"tool_calls": self._calls, "tool_errors": self._errors}

    async def _make(self, call: ToolCall) -> ToolResult:
        if call.error:
            return ToolResult(f"Error: {call.error}", is_error=True)
        return await self._pool.call_tool(call.name, call.arguments)


class OwnProcess:
    """An environment in a process reserved for this episode."""

    def __init__(self, process: EpisodeProcess) -> None:
        self._process = process

    async def reset(self, prompt: Prompt, seed: int) -> OpponentResponse:
        return _answered(await self._process.reset(prompt.messages, prompt.fields, seed))

    async def step(self, completion: str) -> OpponentResponse:
        return _answered(await self._process.step(completion))

    async def finish(self) -> OpponentResponse:
        return _answered(await self._process.finish())

    async def close(self) -> None:
        await self._process.close()

    @property
    def counts(self) -> Mapping[str, int]:
        return {}


def _answered(answer: Mapping[str, Any]) -> OpponentResponse:
    return OpponentResponse(answer["messages"], answer["reward"], answer["done"], answer["parts"], answer["tools"])
