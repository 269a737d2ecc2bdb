"""Episodes and the engine: many episodes wait for tokens at the same time, one stream of completions serves them all.

Belongs here: which completion is whose. Does not belong here: what an episode does with its tokens (`environments`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from orbit_runtime.errors import GateError, OrbitError
from orbit_runtime.loop.signals import StopFlag
from orbit_runtime.rollout.requests import end_all
from orbit_runtime.types import Completion, Engine, Request, Sampling

STOP_SECONDS = 0.2
"""How often a stop request is looked for; an answer may take hours, a pod's grace period is short."""


class Asking:
    """A `TokenSource` under one policy version, for the episodes of one step. For one event loop.

    Requests of all episodes that ask before the engine's next step are submitted together, in the order they asked:
    the samples of a prompt share its prefill, and the same episodes make the same batches.
    """

    def __init__(self, engine: Engine, adapter: str | None, version: int) -> None:
        """Args: version: what every token must carry."""
        self._engine = engine
        self._adapter = adapter
        self._version = version
        self.answered = 0.0
        """When the newest completion came."""
        self._asked = 0
        self._new: list[Request] = []
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._has_new = asyncio.Event()

    async def sample(self, prompt_ids_T: Sequence[int], sampling: Sampling, *, key: int) -> Completion:
        """Raises GateError where a token was sampled under another policy version."""
        loop = asyncio.get_running_loop()
        request = Request(self._asked, key, tuple(prompt_ids_T), sampling, self._adapter)
        self._asked += 1
        if not self._new:
            # After whoever else asks in this turn of the event loop, and before the engine looks again.
            loop.call_soon(self._submit)
        self._new.append(request)
        self._has_new.set()
        future = self._waiting[request.request_id] = loop.create_future()
        completion = await future
        if set(completion.versions_T) - {self._version}:
            raise GateError(
                f"tokens carry versions {sorted(set(completion.versions_T))}, not {self._version}", where="collect"
            )
        return completion

    @property
    def is_sampling(self) -> bool:
        return bool(self._waiting)

    async def run[T](self, episodes: Sequence[Coroutine[Any, Any, T]], stop: StopFlag) -> list[T] | None:
        """Plays all episodes; None: `stop` was set before their end. Nothing of them is under way afterwards.

        Raises:
            OrbitError: what an episode or the engine raised first.
        """
        playing = asyncio.gather(*episodes)
        serving = asyncio.create_task(self._serve())
        try:
            while not playing.done() and not stop:
                await asyncio.wait((playing, serving), timeout=STOP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    serving.result()
            return playing.result() if playing.done() else None
        finally:
            playing.cancel()
            serving.cancel()
            await asyncio.gather(playing, serving, return_exceptions=True)
            if self._waiting:
                await end_all(self._engine)

    def _submit(self) -> None:
        new, self._new = self._new, []
        self._has_new.clear()
        try:
            self._engine.submit(new)
        except OrbitError as error:
            for request in new:
                self._waiting.pop(request.request_id).set_exception(error)

    async def _serve(self) -> None:
        """Hands completions to the episodes that wait for them, for as long as it is let."""
        while True:
            await self._has_new.wait()
            async with aclosing(self._engine.completions()) as completions:
                async for completion in completions:
                    self.answered = time.monotonic()
                    self._waiting.pop(completion.request_id).set_result(completion)
