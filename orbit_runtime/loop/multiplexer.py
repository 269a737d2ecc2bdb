"""Connects episodes to the engine: many episodes wait for tokens at once, and one stream of completions serves them.

Belongs here: which completion belongs to which episode, and which policy samples the rest of an interrupted one. Does
not belong here: what an episode does with its tokens (`environments`).
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Collection, Hashable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from orbit_runtime.errors import GateError, OrbitError
from orbit_runtime.loop.buffer import PartialCompletion, RolloutBuffer
from orbit_runtime.rollout.requests import end_all
from orbit_runtime.types import TOKENS, Completion, Engine, Request, Sampling
from orbit_runtime.workers.child.heartbeat import sign

_NO_VERSIONS = array(TOKENS)


class SamplingPolicy(Protocol):
    """The policy that samples: a published one, or the one that an evaluation measures."""

    @property
    def name(self) -> str | None:
        """Name of its slot; None for the bare base."""

    @property
    def version(self) -> int: ...


@dataclass(frozen=True, slots=True)
class OnePolicy:
    """A policy that does not change while the engine is in use."""

    name: str | None
    version: int


@asynccontextmanager
async def requesting_one(engine: Engine, policy: SamplingPolicy) -> AsyncIterator[RequestMultiplexer]:
    """Gives exclusive use of the engine, under one policy."""
    asking = RequestMultiplexer(engine)
    serving = asyncio.create_task(asking.serve())
    try:
        await asking.switch(policy)
        yield asking
    finally:
        await asking.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class EpisodeTokens:
    """The `TokenSource` of one episode: first the tokens that were already paid for, then the engine's."""

    asking: RequestMultiplexer
    buffer: RolloutBuffer
    step: int
    number: int

    async def sample(self, prompt_ids_T: Sequence[int], sampling: Sampling, *, key: int) -> Completion:
        prompt = tuple(prompt_ids_T)
        paid = self.buffer.paid(self.step, self.number, key)
        # On replay an environment may respond differently; the completions of the first run are then useless.
        so_far = paid.completion if paid is not None and paid.prompt_ids_T == prompt else None
        who = (self.step, self.number)
        self._check_wanted()
        while so_far is None or so_far.finish_reason == "abort":
            before = so_far if so_far and so_far.token_ids_T else None
            so_far = await self.asking.ask(prompt, sampling, key, before, who)
            if so_far.token_ids_T or so_far.finish_reason != "abort":
                self.buffer.pay(*who, PartialCompletion(key, prompt, so_far))
            self._check_wanted()
        self.asking.answered[self.step] = time.monotonic()
        return so_far

    def _check_wanted(self) -> None:
        """Raises CancelledError if the step no longer needs this episode, as if its task had been cancelled."""
        if self.buffer.is_cancelled(self.step, self.number):
            raise asyncio.CancelledError


@dataclass(eq=False)
class _Question:
    prompt_ids_T: tuple[int, ...]
    sampling: Sampling
    key: int
    so_far: Completion | None
    answer: asyncio.Future[Completion]
    who: Hashable = None
    policy: SamplingPolicy | None = None
    """The policy that samples it; set on submission."""
    asked: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that was waiting for tokens when the engine failed."""

    who: Hashable
    seconds: float
    """Seconds since the request, or the request for the rest, was made."""
    text: str
    """Text sampled so far."""


class RequestMultiplexer:
    """Sends requests from one event loop to an engine, always under the newest policy.

    All requests made before the engine's next step are submitted together, in the order they were made. The samples of
    a prompt then share its prefill, and the same episodes form the same batches.
    """

    def __init__(self, engine: Engine) -> None:
        self.answered: dict[int, float] = {}
        """Time of the newest completion, by step."""
        self.unanswered: tuple[WaitingRequest, ...] = ()
        """Requests that a failed engine left unanswered, longest wait first."""
        self._engine = engine
        self._policy: SamplingPolicy | None = None
        self._asked = 0
        self._new: list[_Question] = []
        self._open: dict[int, _Question] = {}
        self._has_new = asyncio.Event()
        self._may_ask = asyncio.Event()
        self._failure: BaseException | None = None

    @property
    def is_sampling(self) -> bool:
        return bool(self._open)

    async def ask(
        self,
        prompt_ids_T: tuple[int, ...],
        sampling: Sampling,
        key: int,
        so_far: Completion | None,
        who: Hashable = None,
    ) -> Completion:
        """Waits for a completion. Its finish reason is `abort` if the policy changed meanwhile or `end` was called.

        Args:
            who: the name by which `end` finds this request.

        Raises:
            GateError: a token carries another policy version than the one asked for.
            OrbitError: the error that ended the engine.
        """
        await self._may_ask.wait()
        if self._failure is not None:
            raise self._failure
        loop = asyncio.get_running_loop()
        if not self._new:
            # Runs after all other requests of this turn of the event loop, and before the engine looks again.
            loop.call_soon(self._submit)
        question = _Question(prompt_ids_T, sampling, key, so_far, loop.create_future(), who)
        self._new.append(question)
        return _checked(await question.answer, question)

    async def switch(self, policy: SamplingPolicy) -> None:
        """Samples everything under this policy from now on; returns when nothing samples from an older one.

        Requests in flight are aborted, and their episodes request the remaining tokens. Keys and values of the tokens
        so far are recomputed, so no token depends on keys and values of another policy.

        Raises:
            OrbitError: the error that ended the engine: it may hold requests that nobody waits for.
        """
        self._policy = policy
        self._may_ask.set()
        await self._end(self._open)
        if self._failure is not None:
            raise self._failure

    async def pause(self) -> None:
        """Aborts requests in flight; callers wait until the next `switch`."""
        self._may_ask.clear()
        self._submit()
        await self._end(self._open)

    def who_waits(self) -> set[Hashable]:
        """Names of those whose tokens are being sampled."""
        return {question.who for question in self._open.values()}

    async def end(self, who: Collection[Hashable]) -> None:
        """Aborts these callers' requests in flight; returns when none of them is being sampled.

        A caller may have made several, and some that were not submitted yet: those are cancelled.
        """
        for question in self._new:
            if question.who in who:
                question.answer.cancel()
        await self._end({number: question for number, question in self._open.items() if question.who in who})

    async def _end(self, request_ids: dict[int, _Question]) -> None:
        if not request_ids:
            return
        waited = [question.answer for question in request_ids.values()]
        self._engine.abort([*request_ids])
        await asyncio.wait(waited)

    async def close(self) -> None:
        if self._open:
            await end_all(self._engine)

    def _submit(self) -> None:
        new, self._new = self._new, []
        assert self._policy is not None
        requests = []
        for question in new:
            if question.answer.done():
                # Its episode was cancelled before the request was submitted.
                continue
            question.policy = self._policy
            self._open[self._asked] = question
            requests.append(
                Request(
                    self._asked, question.key, question.prompt_ids_T, question.sampling, self._policy.name,
                    question.so_far,
                )
            )  # fmt: skip
            self._asked += 1
        if not requests:
            return
        self._has_new.set()
        try:
            self._engine.submit(requests)
        except OrbitError as error:
            for request in requests:
                self._open.pop(request.request_id).answer.set_exception(error)

    async def serve(self) -> None:
        """Hands completions to the episodes that wait for them, until it is cancelled or the engine fails."""
        try:
            while True:
                await self._has_new.wait()
                self._has_new.clear()
                async with aclosing(self._engine.completions()) as completions:
                    async for completion in completions:
                        sign()
                        question = self._open.pop(completion.request_id)
                        if not question.answer.done():
                            question.answer.set_result(completion)
        except Exception as error:
            self._failure = error
            failed, self._open = [*self._open.values(), *self._new], {}
            now = time.monotonic()
            waited = [
                WaitingRequest(each.who, now - each.asked, each.so_far.text if each.so_far else "") for each in failed
            ]
            self.unanswered = tuple(sorted(waited, key=lambda each: -each.seconds))
            for question in failed:
                if not question.answer.done():
                    question.answer.set_exception(error)


def _checked(completion: Completion, question: _Question) -> Completion:
    """Raises GateError if new tokens carry another version than requested, or if the earlier ones changed."""
    assert question.policy is not None
    asked = question.policy.version
    before = question.so_far.versions_T if question.so_far else _NO_VERSIONS
    told = completion.versions_T
    # Compared as arrays: a Python object for each token of a long answer would cost more than all the rest here.
    if told != before + array(TOKENS, (asked,)) * (len(told) - len(before)):
        raise GateError(f"tokens carry versions {sorted(set(told))}, not {asked}", where="collect")
    if completion.finish_reason == "abort" and len(told) >= question.sampling.max_new_tokens:
        # Aborted in the very step in which it would have ended by itself.
        return replace(completion, finish_reason="length")
    return completion
