"""The engine in a thread of its own, asked from the server's event loop.

Belongs here: passing requests and tokens between the two threads. Does not belong here: HTTP, or who may ask.

The engine's thread: consumes jobs, waits for a job, is unblocked by `submit`; produces events, which the server's loop
takes from each job's queue.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import count

from orbit_runtime.errors import OrbitError
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.serve.errors import APIError
from orbit_runtime.types import Completion, Request, Sampling


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion that is asked for."""

    prompt_ids_T: tuple[int, ...]
    key: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Event:
    """What came of one choice."""

    index: int
    completion: Completion
    """As far as it got."""
    is_done: bool


class Job:
    """The choices of one HTTP request. Its methods are for the server's loop."""

    def __init__(self, request_ids: Sequence[int], abort: Callable[[Sequence[int]], None]) -> None:
        self.request_ids = tuple(request_ids)
        self.events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self.is_gone = False
        """Its client is."""
        self._left = set(range(len(request_ids)))
        self._abort = abort

    async def take(self) -> AsyncIterator[Event]:
        """Events until every choice is done.

        Raises:
            OrbitError, APIError: the engine refused or lost them.
        """
        while self._left:
            event = await self.events.get()
            if isinstance(event, Exception):
                self._left.clear()
                raise event
            if event.is_done:
                self._left.discard(event.index)
            yield event

    async def results(self) -> list[Completion]:
        done = {event.index: event.completion async for event in self.take() if event.is_done}
        return [done[index] for index in sorted(done)]

    def abort(self) -> None:
        """Safe to call twice, and after the end."""
        if self._left:
            self._abort(self.request_ids)


class Sampler:
    """Owns the engine's thread. `submit` is for one event loop."""

    def __init__(
        self,
        engine: TorchEngine,
        slot_of: Callable[[str], AbstractContextManager[str | None]],
        ended: Callable[[str, Completion], None],
        *,
        concurrent: int,
        seconds: float,
    ) -> None:
        """
        Args:
            slot_of: the slot that a model name stands for now; it stays loaded within the context.
            ended: told the model name and what came of each request, on the engine's thread.
            concurrent: completions that may be under way or wait.
            seconds: that one of them may take.
        """
        self.failure: Exception | None = None
        """Why nothing is answered any more."""
        self.under_way = 0
        self._engine = engine
        self._slot_of = slot_of
        self._ended = ended
        self._concurrent = concurrent
        self._seconds = seconds
        self._ids = count()
        self._jobs: dict[int, tuple[Job, int, str, asyncio.AbstractEventLoop]] = {}
        """Of the engine's thread, as are the next two."""
        self._streamed: set[int] = set()
        self._told: dict[int, int] = {}
        """Tokens that the client of a streamed request has."""
        self._work = asyncio.Event()
        self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="orbit-engine", daemon=True)
        self._thread.start()

    def submit(self, model: str, choices: Sequence[Choice], *, is_streamed: bool) -> Job:
        """Raises APIError: too much is under way (429), or the engine failed (503)."""
        if self.failure is not None:
            raise APIError(503, "the engine has failed; the server must be restarted", code="engine_failed")
        if self.under_way + len(choices) > self._concurrent:
            raise APIError(
                429, f"{self.under_way} completions are under way, and {self._concurrent} may be", code="overloaded"
            )
        self.under_way += len(choices)
        job = Job([next(self._ids) for _ in choices], self._request_abort)
        loop = asyncio.get_running_loop()
        self._loop.call_soon_threadsafe(self._start, job, model, tuple(choices), is_streamed, loop)
        return job

    def close(self) -> None:
        """Aborts what is under way and ends the thread. The engine stays."""
        self._is_closing = True
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join(timeout=30)

    def _request_abort(self, request_ids: Sequence[int]) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._engine.abort, request_ids)

    # --- the engine's thread ---

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        while not self._is_closing:
            await self._work.wait()
            self._work.clear()
            try:
                async for completion in self._engine.completions():
                    self._tell(completion, is_done=True)
            except Exception as error:  # whatever it is, those who wait must hear of it
                self.failure = error
                for request_id in [*self._jobs]:
                    self._forget(request_id, _lost(error))

    def _end(self) -> None:
        self._engine.abort()
        self._work.set()

    def _start(
        self,
        job: Job,
        model: str,
        choices: Sequence[Choice],
        is_streamed: bool,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._jobs |= {request_id: (job, index, model, loop) for index, request_id in enumerate(job.request_ids)}
        try:
            with self._slot_of(model) as slot:
                self._engine.submit(
                    [
                        Request(
                            request_id,
                            choice.key,
                            choice.prompt_ids_T,
                            choice.sampling,
                            slot,
                            deadline_seconds=self._seconds,
                        )
                        for request_id, choice in zip(job.request_ids, choices, strict=True)
                    ]
                )
        except Exception as error:  # an error that nobody hears of would leave the client waiting
            for request_id in job.request_ids:
                self._forget(request_id, error if isinstance(error, OrbitError) else _lost(error))
            return
        if is_streamed:
            if not self._streamed:
                self._loop.call_soon(self._tell_streamed)
            self._streamed.update(job.request_ids)
        self._work.set()

    def _tell_streamed(self) -> None:
        """Once between two steps of the batch, as long as a client wants its tokens one by one."""
        if not self._streamed:
            return
        for completion in self._engine.so_far(self._streamed):
            tokens = len(completion.token_ids_T)
            if tokens > self._told.get(completion.request_id, 0):
                self._told[completion.request_id] = tokens
                self._tell(completion, is_done=False)
        self._loop.call_soon(self._tell_streamed)

    def _tell(self, completion: Completion, *, is_done: bool) -> None:
        found = self._jobs.get(completion.request_id)
        if found is None:
            return
        job, index, model, loop = found
        _call(loop, job.events.put_nowait, Event(index, completion, is_done))
        if is_done:
            self._ended(model, completion)
            self._forget(completion.request_id)

    def _forget(self, request_id: int, error: Exception | None = None) -> None:
        job, _, _, loop = self._jobs.pop(request_id)
        self._streamed.discard(request_id)
        self._told.pop(request_id, None)
        _call(loop, self._left)
        if error is not None:
            _call(loop, job.events.put_nowait, error)

    def _left(self) -> None:
        """On the server's loop."""
        self.under_way -= 1


def _lost(error: Exception) -> APIError:
    return APIError(503, f"the engine has failed: {type(error).__name__}", code="engine_failed")


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    # A server that has stopped needs nothing any more.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)
