"""Servers that say how likely they find tokens which another model sampled.

Belongs here: sending a sequence to the server that has least to do, and what its answer must be. Does not belong here:
attaching them (`attached`), when they are asked (`loop.served_teacher`).
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Sequence
from functools import partial

from orbit_runtime.errors import EngineDiedError, GateError
from orbit_runtime.rollout.replica import TRIES, Replica
from orbit_runtime.rollout.served import LostError
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.rollout.sglang_api import LEAST_LOGPROB
from orbit_runtime.types import FLOATS

SEQUENCES = 32
"""That one server is sent at the same time: more wait there as well as here, and hold its memory."""


class ServedTeacher:
    """Safe to ask from any event loop: answers of long sequences are read on the client's own thread."""

    def __init__(self, engine: ServedEngine, where: str) -> None:
        """
        Args:
            engine: attached to the servers, without an adapter.
            where: the manifest names them.
        """
        self.engine = engine
        self._where = where
        self._busy: Counter[str] = Counter()
        self._free = asyncio.Semaphore(SEQUENCES * len(engine.replicas))

    async def logprobs(self, token_ids_T: Sequence[int]) -> array[float]:
        """fp32 `[T]` of the servers' own model: of each token after those before it; 0.0 for the first.

        Raises:
            EngineDiedError: (82) no server came back.
            GateError: (84) one answered with what is no log-prob, or came back as another model.
        """
        asking = asyncio.run_coroutine_threadsafe(self._ask(token_ids_T), self.engine.loop)
        found_T = array(FLOATS, await asyncio.wrap_future(asking))
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

    # --- the client's thread ---

    async def _ask(self, token_ids_T: Sequence[int]) -> Sequence[float]:
        """Of a server that is up, where there is one; where one is lost, of another or, once it is back, the same."""
        async with self._free:
            for attempt in range(TRIES * len(self.engine.replicas)):
                replica = self._least_busy()
                self._busy[replica.name] += 1
                try:
                    await replica.wait_up()
                    (scored,) = await replica.attempt(partial(replica.api.score, token_ids_T, [None]))
                    return scored.logprobs_T
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
