"""Servers as a teacher: they score tokens that another model sampled, or name the tokens that they find likeliest."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from orbit_runtime.errors import EngineDiedError, GateError, UnsupportedError
from orbit_runtime.rollout.replica import TRIES, Replica
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.rollout.server_types import LikeliestTokens, LostError, check_likeliest
from orbit_runtime.rollout.streaming import LEAST_LOGPROB
from orbit_runtime.types import FLOATS, TopTokens

SEQUENCES = 32
"""Sequences sent to one server at the same time: waiting there, they would hold its memory too."""
ENTRY_BYTES, ANSWER_BYTES = 80, 1 << 30
"""Most bytes of one likeliest token in a server's JSON, and of all answers of one server at the same time: long answers
reduce the number of concurrent requests.
"""


class ServedTeacher:
    """Safe to ask from any event loop: answers of long sequences are read on the client's own thread."""

    def __init__(
        self, engine: ServedEngine, where: str, *, top_k: int | None = None, vocabulary: int = 0, longest: int = 1
    ) -> None:
        """
        Args:
            engine: attached to the servers, without an adapter.
            where: names them in the manifest.
            top_k: number of tokens that `top_tokens` returns; None if only `logprobs` is called.
            vocabulary: the policy's, whose ids the tokens are.
            longest: most tokens of a sequence.
        """
        self.engine = engine
        self.top_k = top_k
        self._where = where
        self._vocabulary = vocabulary
        self._busy: Counter[str] = Counter()
        fit = ANSWER_BYTES // (ENTRY_BYTES * longest * (top_k or 1))
        self._free = asyncio.Semaphore(max(1, min(SEQUENCES, fit)) * len(engine.replicas))

    def check(self, token_ids_T: Sequence[int]) -> None:
        """Sends each server one request, before the first step.

        Raises:
            UnsupportedError: (78) one reports no likeliest tokens, or fewer.
            GateError: (84) one sent another kind of answer.
            EngineDiedError: (82) one does not answer.
        """
        for replica in self.engine.replicas if self.top_k else ():
            try:
                told = self.engine.call(replica.ask(partial(replica.api.likeliest, token_ids_T, 1, self.top_k or 0)))
            except GateError as error:
                raise UnsupportedError(
                    f"{replica.name} does not tell its {self.top_k} likeliest tokens: {error.message}",
                    where=self._where,
                    fix=f"start vLLM with --max-logprobs {self.top_k} or more, or lower algorithm.teacher.topK, or "
                    "write over: Sampled",
                ) from None
            self._checked(told, token_ids_T, range(1, len(token_ids_T)))

    async def logprobs(self, token_ids_T: Sequence[int]) -> array[float]:
        """fp32 `[T]` of the servers' own model: of each token after those before it; 0.0 for the first.

        Raises:
            EngineDiedError: (82) no server came back.
            GateError: (84) one answered with what is no log-prob, or came back as another model.
        """
        found_T = array(FLOATS, await self._asked(partial(self._score, token_ids_T)))
        # NaN and numbers above 0 are refused where the answer is read.
        if min(found_T) <= LEAST_LOGPROB:
            index = found_T.index(min(found_T))
            raise GateError(
                f"the teacher's log-prob of token {index} of an answer is {found_T[index]}: {token_ids_T[index]} after "
                f"{list(token_ids_T[max(0, index - 4) : index])}",
                where=self._where,
                fix="take a teacher that gives every token of this vocabulary a probability",
            )
        return found_T

    async def top_tokens(self, token_ids_T: Sequence[int], places_R: Sequence[int]) -> TopTokens:
        """The servers' own model's likeliest tokens in these places, in ascending order and none of them the first.

        Raises:
            EngineDiedError: (82) no server came back.
            GateError: (84) one answered with what are no such tokens, or came back as another model.
        """
        return await self._asked(partial(self._likeliest, token_ids_T, places_R))

    # --- the client's thread ---

    async def _asked[T](self, work: Callable[[Replica], Awaitable[T]]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._ask(work), self.engine.loop))

    async def _score(self, token_ids_T: Sequence[int], replica: Replica) -> Sequence[float]:
        (scored,) = await replica.api.score(token_ids_T, [None])
        return scored.logprobs_T

    async def _likeliest(self, token_ids_T: Sequence[int], places_R: Sequence[int], replica: Replica) -> TopTokens:
        first = places_R[0]
        try:
            told = await replica.api.likeliest(token_ids_T, first, self.top_k or 0)
        except GateError as error:
            raise GateError(f"{replica.name}: {error.message}", where=self._where, fix=error.fix) from None
        return self._checked(told.at([place - first for place in places_R]), token_ids_T, places_R)

    def _checked(self, told: LikeliestTokens, token_ids_T: Sequence[int], places_R: Sequence[int]) -> TopTokens:
        return check_likeliest(told, token_ids_T, places_R, vocabulary=self._vocabulary, where=self._where)

    async def _ask[T](self, work: Callable[[Replica], Awaitable[T]]) -> T:
        """Runs `work` on an available server; if that one is lost, on another or, once it is back, on the same."""
        async with self._free:
            for attempt in range(TRIES * len(self.engine.replicas)):
                replica = self._least_busy()
                self._busy[replica.name] += 1
                try:
                    await replica.wait_up()
                    return await replica.attempt(partial(work, replica))
                except LostError as error:
                    if attempt + 1 == TRIES * len(self.engine.replicas):
                        raise replica.died(error) from None
                except EngineDiedError:
                    if all(each.failure for each in self.engine.replicas):
                        raise
                finally:
                    self._busy[replica.name] -= 1
        raise AssertionError("unreachable")

    def _least_busy(self) -> Replica:
        return min(
            self.engine.replicas, key=lambda each: (each.failure is not None, not each.is_up, self._busy[each.name])
        )
