"""Episodes of several turns: policy and opponent take turns until one of them is done or a limit is reached.

Belongs here: the order of turns, limits, and the resulting rollout. Does not belong here: the opponents (`opponents`),
sampling (`rollout`), which step an episode belongs to (`loop`).

Token in, token out: sampled tokens enter the next prompt unchanged. Only the text between them, which the chat template
writes, is encoded.

Legend: `_P` prompts, `_T` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from orbit_runtime.environments.episodes import Episode, Played, Stopped, Track, build_played
from orbit_runtime.environments.scoring import Scoring
from orbit_runtime.environments.settings import OWN_PART, EpisodeSettings, build_calls, joined_text, last_role
from orbit_runtime.environments.trajectory import Trajectory
from orbit_runtime.seeds import stream_key
from orbit_runtime.types import Prompt, Tokenizer, TokenSource
from orbit_runtime.workers.user_code.environment_protocol import EnvironmentFailed
from orbit_runtime.workers.user_code.reward_protocol import RewardResult, RewardScorer


@dataclass(frozen=True, slots=True)
class Answered:
    """The opponent's response to a completion of the policy."""

    messages: Sequence[Mapping[str, Any]] = ()
    reward: float = 0.0
    done: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas for the chat template; read from `reset` only."""


class Opponent(Protocol):
    """The other side of an episode, which responds to the policy. Every method may raise EnvironmentFailed."""

    async def reset(self, prompt: Prompt, seed: int) -> Answered:
        """What the policy reads first."""
        ...

    async def step(self, completion: str) -> Answered: ...

    async def finish(self) -> Answered:
        """Called when a limit has ended the episode; returns its final reward."""
        ...

    async def close(self) -> None: ...

    @property
    def counts(self) -> Mapping[str, int]:
        """Numbers of tool calls and of failed ones; empty without tools."""
        ...


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

    async def play(self, episode: Episode, tokens: TokenSource) -> Played:
        """Plays an episode to its end and has it scored. A failing opponent ends it without a score."""
        state = _State(Trajectory(), [])
        opponent = self._opponent()
        lost: RewardResult | None = None
        stopped: Stopped | None = None
        try:
            await self._converse(episode, state, opponent, tokens)
        except EnvironmentFailed as failure:
            lost = RewardResult(failure.outcome, None, failure.reason)
            if failure.outcome == "timeout":
                stopped = Stopped("environment", failure.reason, failure.stack)
        finally:
            await opponent.close()
        results = [lost] * len(self._all_weights) if lost else await self._score(episode.prompt, state)
        counts = {**opponent.counts, **state.parts}
        track = Track(state.track, results, counts)
        return build_played(self._settings.run, episode, [track], self._all_weights, stopped)

    async def _converse(self, episode: Episode, state: _State, opponent: Opponent, tokens: TokenSource) -> None:
        prompt, settings, track = episode.prompt, self._settings, state.track
        keys = (settings.seed, "sample", prompt.prompt_id, prompt.visit, episode.sample_index)
        # All episodes of a group start with the same seed, because their rewards are compared.
        first = await opponent.reset(prompt, stream_key(settings.seed, "environment", prompt.prompt_id, prompt.visit))
        # Not before: with more episodes than processes, it may have waited for one as long as others played.
        started = settings.clock()
        self._count(state, first)
        state.messages += first.messages
        (ids,) = self._tokenizer.encode_many([state.messages], tools=first.tools)
        self._add_given(state, first.messages, ids)
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
        state.track.add_given(last_role(messages), joined_text(messages), ids_T[:room])

    def _count(self, state: _State, answered: Answered) -> None:
        state.reward += answered.reward
        state.parts |= answered.parts

    async def _score(self, prompt: Prompt, state: _State) -> list[RewardResult]:
        calls = build_calls(self._weights, prompt, state.messages)
        results = await self._scoring.score(calls) if calls else []
        return [RewardResult("value", state.reward), *results] if self._settings.gives_reward else results
