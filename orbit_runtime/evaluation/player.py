"""Plays episodes against a model with limited concurrency.

Belongs here: the order of work, and episodes whose model did not answer. Does not belong here: an episode itself
(`environments`), asking a model (`api_model`; `loop` for engines).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from orbit_runtime.environments.episodes import Environment, Episode
from orbit_runtime.errors import EngineDiedError
from orbit_runtime.evaluation.records import EvalSample, Failure, FailureKind, Usage, build_sample
from orbit_runtime.types import Completion, Prompt, Sampling

GIVE_UP_AFTER = 16
"""Consecutive unanswered samples after which the model counts as down; asking on would only delay the error."""


class UnansweredSample(Exception):
    """The model did not answer one sample after every retry."""

    def __init__(self, kind: FailureKind, reason: str) -> None:
        super().__init__(reason)
        self.failure = Failure(kind, reason)


class MeteredSource(Protocol):
    """A `TokenSource` of one episode that counts its usage."""

    async def sample(self, prompt_ids_T: Sequence[int], sampling: Sampling, *, key: int) -> Completion:
        """Raises Unanswered."""

    @property
    def usage(self) -> Usage: ...


async def play(
    subject: str,
    name: str,
    environment: Environment,
    episodes: Sequence[Episode],
    ask: Callable[[], MeteredSource],
    *,
    concurrency: int,
    keep: Callable[[EvalSample, Prompt], None],
) -> None:
    """Plays all episodes. `concurrency` of them ask at a time, while as many more are scored.

    Args:
        name: name of the environment.
        ask: makes the token source of one episode.
        keep: called with each finished sample and its prompt.

    Raises:
        EngineDiedError: the model did not answer `GIVE_UP_AFTER` consecutive samples, or could not be reached for any.
        OrbitError: the model, the environment or the scorer failed.
    """
    left = iter(episodes)
    places = RequestLimiter(concurrency)
    silent = 0

    async def work(mine: Iterator[Episode]) -> None:
        nonlocal silent
        for episode in mine:
            # An episode's time limit starts here, so it begins with a place.
            await places.take(begins=True)
            started, tokens = time.monotonic(), ask()
            asking = _InTurn(tokens, places)
            try:
                played = await environment.play(episode, asking)
            except UnansweredSample as error:
                sample = _unanswered(subject, name, episode, tokens.usage, error.failure)
                silent += 1
            else:
                sample = build_sample(subject, name, played, tokens.usage, time.monotonic() - started)
                silent = 0
            # A failed environment may have asked nothing, and so still have its place.
            asking.give_back()
            keep(sample, episode.prompt)
            is_gone = silent == len(episodes) and sample.failure is not None and sample.failure.kind == "Unreachable"
            if silent >= GIVE_UP_AFTER or is_gone:
                assert sample.failure is not None
                raise EngineDiedError(
                    f"{subject} did not answer the last {silent} samples: {sample.failure.kind}: "
                    f"{sample.failure.reason}",
                    where=name,
                    fix="check that the model is up and reachable, then repeat the command: it requests only the "
                    "missing samples",
                )

    # All workers draw from one iterator.
    workers = [asyncio.create_task(work(left)) for _ in range(min(2 * concurrency, len(episodes)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


class RequestLimiter:
    """Limits how many ask at a time. A running episode goes before one that begins, as its time is limited."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._under_way: deque[asyncio.Future[None]] = deque()
        self._beginning: deque[asyncio.Future[None]] = deque()

    async def take(self, *, begins: bool = False) -> None:
        """Waits for a place. A caller that is cancelled meanwhile holds none."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        (self._beginning if begins else self._under_way).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give_back()
            raise

    def give_back(self) -> None:
        for waiting in (self._under_way, self._beginning):
            while waiting:
                turn = waiting.popleft()
                if not turn.done():
                    turn.set_result(None)
                    return
        self._free += 1


class _InTurn:
    """A `TokenSource` that asks only with a place, so that an episode being scored does not occupy one.

    It is created with a place. An episode with branches asks several times at once, each with a place of its own.
    """

    def __init__(self, tokens: MeteredSource, places: RequestLimiter) -> None:
        self._tokens = tokens
        self._places = places
        self._has_place = True
        """Whether the place that it was created with is still free."""

    async def sample(self, prompt_ids_T: Sequence[int], sampling: Sampling, *, key: int) -> Completion:
        if self._has_place:
            self._has_place = False
        else:
            await self._places.take()
        try:
            completion = await self._tokens.sample(prompt_ids_T, sampling, key=key)
        except UnansweredSample:
            self._places.give_back()
            raise
        # Any other error ends the evaluation, so the place is not given to another episode.
        self._places.give_back()
        # The next holder of the place asks in the loop's next turn; this answer is scored in the turn after that.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return completion

    def give_back(self) -> None:
        """The place of an episode that ended without asking. Safe to call twice."""
        if self._has_place:
            self._has_place = False
            self._places.give_back()


def _unanswered(subject: str, name: str, episode: Episode, usage: Usage, failure: Failure) -> EvalSample:
    prompt = episode.prompt
    turns = tuple((str(each.get("role")), str(each.get("content") or "")) for each in prompt.messages)
    return EvalSample(
        subject, name, prompt.prompt_id, episode.sample_index, turns, None, "unanswered", usage=usage, failure=failure
    )
