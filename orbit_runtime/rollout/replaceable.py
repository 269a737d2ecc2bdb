"""A torch engine whose base can be replaced while it answers: requests in flight end on the base they began with.

Belongs here: which engine gets a request, and when the previous one is let go. Does not belong here: sampling
(`torch_engine`), loading and proving a base (`serve`).
"""

from __future__ import annotations

import asyncio
import gc
import threading
from array import array
from collections.abc import AsyncGenerator, Callable, Collection, Sequence

import torch

from orbit_runtime.errors import GateError
from orbit_runtime.rollout.news import Alternatives, News
from orbit_runtime.rollout.torch_engine import TorchEngine
from orbit_runtime.types import FLOATS, TOKENS, AdapterFiles, Completion, Request, ServerReading


class ReplaceableEngine:
    """A `StreamingEngine`. `replace` may be called from any thread, as long as no `submit` runs meanwhile."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._before: TorchEngine | None = None
        """The previous one, until its last request has ended."""
        self._lock = threading.Lock()
        """Held while either of the two changes."""
        self._tell: Callable[[], None] | None = None

    def replace(self, engine: TorchEngine) -> None:
        """From now on requests go to this engine. Slots of the previous one are not carried over.

        Call `check_replaceable` before, and `let_go` afterwards.
        """
        with self._lock:
            assert self._before is None, "three engines would be held"
            self._before, self._engine = self._engine, engine

    def check_replaceable(self) -> None:
        """Raises GateError if requests of an engine that was replaced before are still in flight."""
        self.let_go()
        before = self._before
        if before is not None:
            raise GateError(
                f"{len(before.under_way)} completions that began under the weights before these have not ended, and "
                "a third copy of the model would be needed",
                fix="send it again once they have ended",
            )

    def let_go(self) -> None:
        """Frees the previous engine's weights if its last request has ended. Safe to call twice."""
        with self._lock:
            if self._before is None or self._before.under_way:
                return
            device = self._before.device
            self._before = None
        # The engine's parts refer to each other, so only a collection frees its weights.
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def _engines(self) -> tuple[TorchEngine, ...]:
        with self._lock:
            return (self._engine,) if self._before is None else (self._before, self._engine)

    # --- generation ---

    def submit(self, requests: Sequence[Request]) -> None:
        self._engine.submit(requests)

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        for engine in self._engines():
            engine.abort(request_ids)

    @property
    def under_way(self) -> Collection[int]:
        engines = self._engines()
        return engines[0].under_way if len(engines) == 1 else {each for engine in engines for each in engine.under_way}

    def listen(self, tell: Callable[[], None] | None) -> None:
        """`tell` is called after each step of the batches."""
        self._tell = tell

    def news(self) -> News | None:
        found = [news for engine in self._engines() if (news := engine.news()) is not None]
        return found[0] if len(found) == 1 else _joined(found)

    async def completions(self) -> AsyncGenerator[Completion]:
        """Like `TorchEngine.completions`; after a replacement, both batches advance in turn."""
        while True:
            await asyncio.sleep(0)
            if self._tell is not None:
                await asyncio.sleep(0)
            done = [completion for engine in self._engines() for completion in engine.advance()]
            if self._tell is not None:
                self._tell()
            if self._before is not None:
                self.let_go()
            if not done and not self.under_way:
                return
            for completion in done:
                yield completion

    # --- slots, of the current engine ---

    def load_adapter(self, name: str, adapter: AdapterFiles) -> None:
        self._engine.load_adapter(name, adapter)

    def unload_adapter(self, name: str) -> None:
        self._engine.unload_adapter(name)

    def adapters(self) -> tuple[str, ...]:
        return self._engine.adapters()

    def copies(self) -> tuple[TorchEngine, ...]:
        return self._engine.copies()

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def read_servers(self) -> tuple[ServerReading, ...]:
        return ()

    def close(self) -> None:
        for engine in self._engines():
            engine.close()


def _joined(found: Sequence[News]) -> News | None:
    """News of several engines, whose requests differ, as one record."""
    if not found:
        return None
    ids, counts = array(found[0].request_ids_D.typecode), array(found[0].counts_D.typecode)
    tokens: array[int] = array(TOKENS)
    logprobs: array[float] = array(FLOATS)
    alternatives: dict[int, Alternatives] = {}
    for news in found:
        ids += news.request_ids_D
        counts += news.counts_D
        tokens += news.token_ids_T
        logprobs += news.logprobs_T
        alternatives |= news.alternatives
    return News(ids, counts, tokens, logprobs, alternatives)
