"""Episodes in which an environment asks the policy itself: several answers at a time, from any point it has reached.

Belongs here: the tokens of an episode's branches, its limits, and which of them become rollouts. Does not belong here:
what the environment sees of it, in its own process (`workers.user_code`), sampling (`rollout`).

Token in, token out, as in `turns`. The environment names branches and never sees a token, so that masks follow
from what was sampled: a token trains in the first of the episode's rollouts that contains it.

Legend: `_P` prompts, `_T` tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orbit_runtime.environments.episodes import (
    OWN_PART,
    UNCHOSEN,
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
from orbit_runtime.seeds import stream_key
from orbit_runtime.types import Completion, FinishReason, Prompt, Tokenizer, TokenSource
from orbit_runtime.workers.user_code.environment_pool import EpisodeProcess
from orbit_runtime.workers.user_code.environment_protocol import EnvironmentFailed, Path
from orbit_runtime.workers.user_code.reward_protocol import RewardResult, RewardScorer

MAX_ANSWERS = 4096
"""Answers of one episode, over all branches."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """A completion in the tree, and the tokens between it and the answer before."""

    before: _Answer | None
    given_T: tuple[int, ...]
    given: Sequence[tuple[str, str]]
    """Role and text of each turn."""
    completion: Completion
    messages: tuple[Mapping[str, Any], ...]
    """The conversation up to and including this answer."""
    turns: int
    length: int
    """Tokens up to and including this answer."""
    sampled: int
    """The policy's tokens among them."""

    def path(self) -> list[_Answer]:
        """The answers from the first to this one."""
        found, node = [self], self.before
        while node is not None:
            found.append(node)
            node = node.before
        return found[::-1]

    def ids_T(self) -> list[int]:
        return [token for each in self.path() for token in (*each.given_T, *each.completion.token_ids_T)]


class _Tree:
    """The answers of one episode."""

    def __init__(
        self, settings: EpisodeSettings, tokenizer: Tokenizer, episode: Episode, tokens: TokenSource
    ) -> None:  # fmt: skip
        prompt = episode.prompt
        self._settings = settings
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._key = (settings.seed, "sample", prompt.prompt_id, prompt.visit, episode.sample_index)
        self._started = settings.clock()
        self._asked = 0
        self.answers: dict[Path, _Answer] = {}
        """Path → the last answer on it; after a limit, the answer before."""
        self.cut: dict[Path, FinishReason] = {}
        """The limits that were reached."""
        self.newest: _Answer | None = None
        self.sampled = 0
        """Tokens over all branches."""

    def start(self) -> None:
        """Starts the episode's time: it has a process."""
        self._started = self._settings.clock()

    def begin(self, ask: Mapping[str, Any]) -> list[asyncio.Task[dict[str, Any]]]:
        """One task for each answer that is asked for; they start in this order, within one
        iteration of the event loop.
        """
        parent, first, count = tuple(ask["parent"]), int(ask["first"]), int(ask["count"])
        self._asked += count
        if self._asked > MAX_ANSWERS:
            raise EnvironmentFailed("crash", f"it asked for more than {MAX_ANSWERS} answers")
        before = self.answers.get(parent)
        messages = (*(before.messages if before else ()), *ask["messages"])
        if before is None:
            (given_T,) = self._tokenizer.encode_many([messages], tools=ask["tools"])
        else:
            last_T = before.completion.token_ids_T[-1:]
            given_T = self._tokenizer.encode_continuation(
                messages, len(before.messages) - 1, last_T[0] if last_T else None, tools=ask["tools"]
            )
        given = given_turns(ask["messages"])
        return [
            asyncio.create_task(self._answer((*parent, number), before, tuple(given_T), given, messages))
            for number in range(first, first + count)
        ]

    async def _answer(
        self,
        path: Path,
        before: _Answer | None,
        given_T: tuple[int, ...],
        given: Sequence[tuple[str, str]],
        messages: tuple[Mapping[str, Any], ...],
    ) -> dict[str, Any]:
        """Samples one answer. Returns the environment's view of it."""
        length = (before.length if before else 0) + len(given_T)
        sampled, turns = (before.sampled, before.turns) if before else (0, 0)
        room = self._settings.room(length, sampled)
        ended = self._settings.limit_reached(room, turns, self._settings.clock() - self._started)
        if ended is not None:
            self.cut[path] = ended
            if before is not None:
                self.answers[path] = before
            return {"path": path, "text": "", "finish_reason": ended, "is_over": True}
        prompt_T = [*(before.ids_T() if before else ()), *given_T]
        sampling = replace(self._settings.sampling, max_new_tokens=room)
        completion = await self._tokens.sample(prompt_T, sampling, key=stream_key(*self._key, *path))
        count = len(completion.token_ids_T)
        told = (*messages, {"role": "assistant", "content": completion.text})
        node = _Answer(before, given_T, given, completion, told, turns + 1, length + count, sampled + count)
        self.answers[path] = self.newest = node
        self.sampled += count
        is_over = completion.finish_reason != "stop"
        return {
            "path": path, "text": completion.text, "finish_reason": completion.finish_reason, "is_over": is_over,
        }  # fmt: skip

    def tracks(self, chosen: Sequence[_Answer | None]) -> list[Trajectory]:
        """Trajectories up to these answers. A token trains in the first of them that contains it."""
        found, trained = [], set()
        for last in chosen:
            track = Trajectory()
            for node in last.path() if last is not None else ():
                track.add_given(node.given, node.given_T)
                if id(node) in trained:
                    track.add_repeated(node.completion)
                else:
                    track.add_answer(node.completion)
                    trained.add(id(node))
            found.append(track)
        return found


class Branching:
    """Builds episodes from prompts and plays them, any number at a time, in one event loop."""

    def __init__(
        self,
        settings: EpisodeSettings,
        tokenizer: Tokenizer,
        scorer: RewardScorer,
        weights: Mapping[str, float],
        process: Callable[[], EpisodeProcess],
        cohorts: Sequence[str],
        *,
        only_first: bool = False,
    ) -> None:
        """
        Args:
            process: opens a process for each episode.
            cohorts: of each of an episode's rollouts; their number divides the group size.
            only_first: give the first rollout of an episode only, and play as many episodes as a group has rollouts.
        """
        self._settings = settings
        self._tokenizer = tokenizer
        self._scoring = Scoring(scorer)
        self._weights = dict(weights)
        """Reward name → its factor in the sum, in the manifest's order."""
        self._process = process
        self._cohorts = tuple(cohorts[:1] if only_first else cohorts)
        self._all_weights = {OWN_PART: 1.0, **self._weights}

    def build_episodes(self, prompts_P: Sequence[Prompt], step: int) -> list[Episode]:
        """Episodes for the prompts, in order: as many per prompt as give a group. Their tokens are known once they are
        played.
        """
        firsts = range(0, self._settings.group_size, len(self._cohorts))
        return [Episode(step, prompt, first, ()) for prompt in prompts_P for first in firsts]

    async def play(self, episode: Episode, tokens: TokenSource) -> FinishedEpisode:
        """Runs the environment to its end and has its choice scored. One that fails ends without a score."""
        tree = _Tree(self._settings, self._tokenizer, episode, tokens)
        process = self._process()
        stopped: EpisodeTimeout | None = None
        try:
            told = await self._converse(episode, process, tree)
        except EnvironmentFailed as failure:
            if failure.outcome == "timeout":
                stopped = EpisodeTimeout("environment", failure.reason, failure.stack)
            lost = [RewardResult(failure.outcome, None, failure.reason)] * len(self._all_weights)
            # What it was doing is worth a look.
            tracks = tree.tracks([tree.newest, *[None] * (len(self._cohorts) - 1)])
            results, parts = [lost] * len(tracks), [dict[str, float]()] * len(tracks)
        else:
            told = told[: len(self._cohorts)]
            paths = [tuple(each["path"]) for each in told]
            chosen = [tree.answers.get(path) for path in paths]
            tracks, parts = tree.tracks(chosen), [dict(each["parts"]) for each in told]
            for path, track in zip(paths, tracks, strict=True):
                track.finish_reason = tree.cut.get(path, track.finish_reason)
            results = await self._score(episode.prompt, chosen, [each["reward"] for each in told])
        finally:
            await process.close()
        unchosen = tree.sampled - sum(track.sampled for track in tracks)
        counts = [{**each, **({UNCHOSEN: unchosen} if not index else {})} for index, each in enumerate(parts)]
        return build_finished(
            self._settings.run,
            episode,
            [Track(*each) for each in zip(tracks, results, counts, self._cohorts, strict=True)],
            self._all_weights,
            stopped,
        )

    async def _converse(self, episode: Episode, process: EpisodeProcess, tree: _Tree) -> list[dict[str, Any]]:
        """Answers the environment until it has chosen, and every answer that it requested has ended.

        The environment is late if it sends no message for as long as one step may take while nothing is sampled for it.

        Raises:
            EnvironmentFailed: the environment failed; nothing is sampled for it now.
            CancelledError: the step continues without this episode.
        """
        prompt, seed = episode.prompt, self._settings.seed
        # All episodes of a group start with the same seed, because their rewards are compared.
        shared = stream_key(seed, "environment", prompt.prompt_id, prompt.visit)
        await process.play(prompt.messages, prompt.fields, shared)
        tree.start()
        receiving = asyncio.create_task(process.receive())
        sampling: list[asyncio.Task[dict[str, Any]]] = []
        try:
            while True:
                patience = None if sampling else process.seconds
                done, _ = await asyncio.wait(
                    (receiving, *sampling), timeout=patience, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    raise await process.end_late()
                ended = [task for task in sampling if task in done]
                sampling = [task for task in sampling if task not in done]
                answers = await _results(ended, sampling)
                if receiving in done:
                    message = receiving.result()
                    if "chosen" in message:
                        await _results(sampling)
                        return list(message["chosen"])
                    receiving = asyncio.create_task(process.receive())
                    sampling += tree.begin(message["ask"])
                if answers:
                    await process.send({"answers": answers})
        except EnvironmentFailed as failure:
            await _results(sampling)
            if failure.outcome == "crash" and receiving.done():
                receiving.result()  # it knows how the process ended
            raise
        finally:
            left = (receiving, *sampling)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _score(
        self, prompt: Prompt, chosen: Sequence[_Answer | None], rewards: Sequence[float]
    ) -> list[list[RewardResult]]:
        """The rewards of each rollout, in the order of `_all_weights`."""
        calls = [
            call
            for node in chosen
            for call in build_calls(self._weights, prompt, node.messages if node else prompt.messages)
        ]
        results = iter(await self._scoring.score(calls) if calls else ())
        own = [RewardResult("value", reward) for reward in rewards]
        return [[each, *(next(results) for _ in self._weights)] for each in own]


async def _results[T](ended: Sequence[asyncio.Task[T]], others: Sequence[asyncio.Task[T]] = ()) -> list[T]:
    """Results of the tasks, once all have ended. If one was cancelled or failed, waits for `others` too: an engine must
    not keep sampling for an episode that is gone.
    """
    await asyncio.gather(*ended, return_exceptions=True)
    if any(task.cancelled() or task.exception() for task in ended):
        await asyncio.gather(*others, return_exceptions=True)
    return [task.result() for task in ended]
