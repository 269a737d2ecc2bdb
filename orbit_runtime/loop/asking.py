"""Episodes and the engine: many episodes wait for tokens at the same time, one stream of completions serves them all.

Belongs here: which completion is whose, and under which policy what is left of it is sampled. Does not belong here:
what an episode does with its tokens (`environments`).
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
from orbit_runtime.loop.buffer import Paid, RolloutBuffer
from orbit_runtime.rollout.requests import end_all
from orbit_runtime.types import TOKENS, Completion, Engine, Request, Sampling


class Sampled(Protocol):
    """The policy that samples: a publication, or what an evaluation measures."""

    @property
    def name(self) -> str | None:
        """Of its slot; None: the bare base."""
        ...

    @property
    def version(self) -> int: ...


@dataclass(frozen=True, slots=True)
class OnePolicy:
    """The only one that samples, as long as it is asked."""

    name: str | None
    version: int


@asynccontextmanager
async def asking_one(engine: Engine, policy: Sampled) -> AsyncIterator[Asking]:
    """An engine that nobody else asks meanwhile, under one policy."""
    asking = Asking(engine)
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
    """The `TokenSource` of one episode: what was paid for it already, and then the engine."""

    asking: Asking
    buffer: RolloutBuffer
    step: int
    number: int

    async def sample(self, prompt_ids_T: Sequence[int], sampling: Sampling, *, key: int) -> Completion:
        prompt = tuple(prompt_ids_T)
        paid = self.buffer.paid(self.step, self.number, key)
        # An environment may answer otherwise the second time: then what followed is of no use.
        so_far = paid.completion if paid is not None and paid.prompt_ids_T == prompt else None
        who = (self.step, self.number)
        self._check_wanted()
        while so_far is None or so_far.finish_reason == "abort":
            before = so_far if so_far and so_far.token_ids_T else None
            so_far = await self.asking.ask(prompt, sampling, key, before, who)
            if so_far.token_ids_T or so_far.finish_reason != "abort":
                self.buffer.pay(*who, Paid(key, prompt, so_far))
            self._check_wanted()
        self.asking.answered[self.step] = time.monotonic()
        return so_far

    def _check_wanted(self) -> None:
        """An episode that its step goes on without ends here as one whose task is cancelled."""
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
    policy: Sampled | None = None
    """That samples, once it was submitted."""
    asked: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Who waited for tokens when the engine failed."""

    who: Hashable
    seconds: float
    """Since it asked, or asked for the rest."""
    text: str
    """That it had by then."""


class Asking:
    """Asks an engine, for one event loop, always under the newest policy.

    Requests of all episodes that ask before the engine's next step are submitted together, in the order they asked:
    the samples of a prompt share its prefill, and the same episodes make the same batches.
    """

    def __init__(self, engine: Engine) -> None:
        self.answered: dict[int, float] = {}
        """When the newest completion came, by step."""
        self.unanswered: tuple[Unanswered, ...] = ()
        """Of an engine that failed, who waited longest first."""
        self._engine = engine
        self._policy: Sampled | None = None
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
        """Until it ends or is ended; as `abort` it comes back where the policy changed meanwhile, or by `end`.

        Args:
            who: by what name `end` knows who asks.

        Raises:
            GateError: a token does not carry the version that was asked for.
            OrbitError: what ended the engine.
        """
        await self._may_ask.wait()
        if self._failure is not None:
            raise self._failure
        loop = asyncio.get_running_loop()
        if not self._new:
            # After whoever else asks in this turn of the event loop, and before the engine looks again.
            loop.call_soon(self._submit)
        question = _Question(prompt_ids_T, sampling, key, so_far, loop.create_future(), who)
        self._new.append(question)
        return _checked(await question.answer, question)

    async def switch(self, policy: Sampled) -> None:
        """From now on everything is sampled by this policy; returns when nothing samples from an older one.

        What is under way ends where it is, and its episode asks for the rest: keys and values of the tokens so far are
        computed anew, so that no token depends on those of another policy.
        """
        self._policy = policy
        self._may_ask.set()
        await self._end(self._open)

    async def pause(self) -> None:
        """Ends what is under way where it is; who asks waits."""
        self._may_ask.clear()
        self._submit()
        await self._end(self._open)

    def who_waits(self) -> set[Hashable]:
        """For tokens that are being sampled."""
        return {question.who for question in self._open.values()}

    async def end(self, who: Collection[Hashable]) -> None:
        """Ends what is sampled for these where it is; returns when nothing is any more."""
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
                # Its episode was ended before it came to this.
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
        """Hands completions to the episodes that wait for them, for as long as it is let."""
        try:
            while True:
                await self._has_new.wait()
                self._has_new.clear()
                async with aclosing(self._engine.completions()) as completions:
                    async for completion in completions:
                        question = self._open.pop(completion.request_id)
                        if not question.answer.done():
                            question.answer.set_result(completion)
        except Exception as error:
            self._failure = error
            failed, self._open = [*self._open.values(), *self._new], {}
            now = time.monotonic()
            waited = [
                Unanswered(each.who, now - each.asked, each.so_far.text if each.so_far else "") for each in failed
            ]
            self.unanswered = tuple(sorted(waited, key=lambda each: -each.seconds))
            for question in failed:
                if not question.answer.done():
                    question.answer.set_exception(error)


def _checked(completion: Completion, question: _Question) -> Completion:
    """Raises GateError where the engine tells another version than it was asked for, or changed what was there."""
    assert question.policy is not None
    asked = question.policy.version
    before = question.so_far.versions_T if question.so_far else array(TOKENS)
    told = completion.versions_T
    if told[: len(before)] != before or set(told[len(before) :]) - {asked}:
        raise GateError(f"tokens carry versions {sorted(set(told))}, not {asked}", where="collect")
    if completion.finish_reason == "abort" and len(told) >= question.sampling.max_new_tokens:
        # Ended in the very step in which it would have ended.
        return replace(completion, finish_reason="length")
    return completion
