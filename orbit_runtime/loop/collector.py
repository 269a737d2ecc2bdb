"""Plays the episodes of steps, and where steps overlap, plays them while the loop trains.

Belongs here: which steps are in progress, handing them over, and the thread of the event loop. Does not belong here: an
episode (`environments`), its tokens (`multiplexer`), when a step may begin (`steps`).

Torch keeps a team of threads for each thread that computes. With an engine in this process, two threads that compute
would be two teams on the same cores, whose threads then sleep between operations instead of waiting for the next one (a
step of the quickstart: 0.57 s instead of 0.35 s, decision 10). So an event loop has its own thread only where it is to
go on while the loop trains.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from orbit_runtime.environments.episodes import Environment, Episode
from orbit_runtime.loop.buffer import EpisodeSnapshot, RolloutBuffer, StepRollouts
from orbit_runtime.loop.collect import MAX_STOPPED, CollectedStep, EpisodeEvidence, build_groups, gather_stopped
from orbit_runtime.loop.multiplexer import EpisodeTokens, RequestMultiplexer
from orbit_runtime.loop.publish import Publication
from orbit_runtime.types import Engine, Prompt
from orbit_runtime.workers.child.heartbeat import sign
from orbit_runtime.workers.child.signals import StopFlag
from orbit_runtime.workers.system import ClosedAtEnd

STOP_SECONDS = 0.2
"""Seconds between checks for a stop request: a completion may take hours, and a pod's grace period is short."""
END_SECONDS = 60.0
"""Limit for shutting down: long enough for a decode step, or for servers to abort what they sample."""


@dataclass(frozen=True)
class _Step:
    prompts_P: Sequence[Prompt]
    playing: StartedTask[None]


class Collector(ClosedAtEnd):
    """Plays the episodes of several steps at once.

    Consumes: prompts of steps that may begin (`begin`). Waits for: tokens and scores. Unblocked by: `switch`, with the
    policy that samples from then on. Produces: steps, whole and in order, for `take`. It holds only steps that were
    begun and not yet taken, which bounds both the number of waiting rollouts and their staleness.
    """

    def __init__(
        self,
        environment: Environment,
        engine: Engine,
        *,
        taken: int = 0,
        restored: Sequence[EpisodeSnapshot] = (),
        overlaps: bool = True,
    ) -> None:
        """
        Args:
            taken: the newest step that was trained.
            restored: what a checkpoint kept of later steps.
            overlaps: whether episodes go on while the caller does something else. False: only while it waits for them,
                in its own thread.
        """
        self._environment = environment
        self._buffer = RolloutBuffer(taken, restored)
        self._asking = RequestMultiplexer(engine)
        self._steps: dict[int, _Step] = {}
        self._loop: EventLoop = OwnThread("orbit-collector") if overlaps else CallersThread()
        self._is_closed = False
        self._serving = self._loop.start(self._asking.serve())

    # --- the thread that owns the run ---

    def begin(self, step: int, prompts_P: Sequence[Prompt], wanted: int | None = None) -> None:
        """Starts the step's episodes and returns at once. What keeps them from starting is raised by `take`.

        Args:
            wanted: number of groups that suffice: once so many have ended, all other episodes are cancelled. None: all.
        """
        self._steps[step] = _Step(prompts_P, self._loop.start(self._play_all(step, prompts_P, wanted)))

    def begin_again(self, step: int, prompts_P: Sequence[Prompt], wanted: int | None = None) -> None:
        """Adds prompts to the step that was taken last, while no later step is in progress."""
        self._loop.run(self._reopen(step))
        self.begin(step, prompts_P, wanted)

    def switch(self, policy: Publication) -> None:
        """Samples from `policy` from now on; returns when nothing samples from an older policy."""
        self._loop.run(self._asking.switch(policy))

    def take(self, step: int, stop: StopFlag) -> CollectedStep | None:
        """Waits for the step's rollouts and removes them; None if `stop` was set first.

        Raises:
            OrbitError: the first error of an episode or of the engine.
        """
        waited = time.monotonic()
        playing = self._steps[step].playing
        while not playing.done() and not stop:
            self._loop.wait(playing, STOP_SECONDS)
        if not playing.done():
            return None
        playing.result()
        ended = time.monotonic()
        sampled = min(ended, max(waited, self._asking.answered.pop(step, waited)))
        taken, (waiting, unfinished) = self._loop.run(self._take(step))
        prompts_P = self._steps.pop(step).prompts_P
        return CollectedStep(
            build_groups([prompts_P[index] for index in taken.groups], taken.rollouts),
            tuple(dict.fromkeys(reason for each in taken.played for reason in each.reasons)),
            sampled - waited,
            ended - sampled,
            waiting,
            unfinished,
            taken.prompts_cancelled,
            taken.tokens_cancelled,
            gather_stopped(taken.played),
        )

    def play(self, work: Callable[[RequestMultiplexer], Coroutine[Any, Any, None]], stop: StopFlag) -> bool:
        """Runs `work` on the event loop, among the episodes in flight; False if `stop` ended it early.

        The caller waits here and so cannot `switch`: one policy samples from the first token to the last.

        Raises:
            OrbitError: what `work` raised.
        """
        playing = self._loop.start(work(self._asking))
        while not playing.done() and not stop:
            self._loop.wait(playing, STOP_SECONDS)
        if not playing.done():
            playing.cancel()
            return False
        playing.result()
        return True

    @property
    def doing(self) -> str:
        return "sampling" if self._asking.is_sampling else "being scored"

    def keep(self) -> tuple[EpisodeSnapshot, ...]:
        """A snapshot of everything that was paid for and is not taken yet."""
        return self._loop.run(self._keep())

    def unanswered(self) -> tuple[EpisodeEvidence, ...]:
        """Episodes that waited for tokens when the engine failed, longest wait first; none if it did not fail."""
        found = []
        for each in self._asking.unanswered[:MAX_STOPPED]:
            if isinstance(each.who, tuple):
                prompt_id, _, sample = self._buffer.name(*each.who)
                reason = f"{each.seconds:.0f} s without an answer when the engine failed"
                found.append(EpisodeEvidence(prompt_id, sample, "sampling", reason, "", (("assistant", each.text),)))
        return tuple(found)

    def pause(self) -> None:
        """Aborts requests in flight, before a last `keep`, which lacks the newest tokens of those that do not end."""
        with suppress(TimeoutError):
            self._loop.run(self._asking.pause(), END_SECONDS)

    def close(self) -> None:
        """Ends everything in progress. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(TimeoutError):
            self._loop.run(self._end(), END_SECONDS)
        self._loop.close()

    # --- in the event loop ---

    async def _reopen(self, step: int) -> None:
        self._buffer.reopen(step)

    async def _play_all(self, step: int, prompts_P: Sequence[Prompt], wanted: int | None) -> None:
        """Returns when each episode has ended or was cancelled, so that nothing of the step is in flight."""
        # Here and not in `begin`: where steps overlap, the thread that trains does not wait for prompts to be encoded.
        episodes = self._environment.build_episodes(prompts_P, step)
        self._buffer.begin(step, episodes, wanted)
        playing: dict[int, asyncio.Task[None]] = {}
        for number, episode in enumerate(episodes):
            if self._buffer.is_open(step, number):
                playing[number] = asyncio.create_task(self._play(step, number, episode, playing))
        await asyncio.gather(*playing.values())

    async def _play(
        self, step: int, number: int, episode: Episode, playing: Mapping[int, asyncio.Task[None]]
    ) -> None:  # fmt: skip
        tokens = EpisodeTokens(self._asking, self._buffer, step, number)
        try:
            played = await self._environment.play(episode, tokens)
        except asyncio.CancelledError:
            if not self._buffer.is_cancelled(step, number):
                raise
            return
        sign()
        cancelled = self._buffer.end(step, number, played)
        if cancelled:
            await self._cancel(step, {each: playing[each] for each in cancelled})

    async def _cancel(self, step: int, playing: Mapping[int, asyncio.Task[None]]) -> None:
        """Cancels these episodes: those waiting for the engine through an abort, whose tokens count; others at once."""
        asked = self._asking.who_waits()
        for number, task in playing.items():
            if (step, number) not in asked:
                task.cancel()
        await self._asking.end({(step, number) for number in playing})

    async def _take(self, step: int) -> tuple[StepRollouts, tuple[int, int]]:
        return self._buffer.take(step), self._buffer.counts

    async def _keep(self) -> tuple[EpisodeSnapshot, ...]:
        return self._buffer.keep()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._asking.close()


JOIN_SECONDS = 60.0
"""Limit for the end of a thread: a decode step is not interrupted."""


class StartedTask[T](Protocol):
    """A coroutine that was started: a future of either kind."""

    def done(self) -> bool: ...

    def result(self) -> T:
        """Once it is done."""

    def cancel(self) -> bool: ...


class EventLoop(Protocol):
    """An event loop, as the thread that owns the run uses it."""

    def start[T](self, work: Coroutine[Any, Any, T]) -> StartedTask[T]:
        """Returns at once."""

    def run[T](self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Waits for the result; raises TimeoutError after so long."""

    def wait(self, started: StartedTask[Any], seconds: float) -> None:
        """Waits until it is done, at most so long."""

    def close(self) -> None:
        """Ends the loop; callers end what runs in it first."""


class OwnThread:
    """Goes on whatever the caller does."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start[T](self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run[T](self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        return self.start(work).result(seconds)

    def wait(self, started: StartedTask[Any], seconds: float) -> None:
        assert isinstance(started, Future)
        wait((started,), seconds)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


class CallersThread:
    """A thread that runs only while its caller waits in `run` or `wait`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def start[T](self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        # Who started it asks for its error, or has had another one: no traceback where nobody asks.
        task.add_done_callback(_retrieve)
        return task

    def run[T](self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(work, seconds))

    def wait(self, started: StartedTask[Any], seconds: float) -> None:
        assert isinstance(started, asyncio.Task)
        self._loop.run_until_complete(asyncio.wait((started,), timeout=seconds))

    def close(self) -> None:
        self._loop.close()


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
