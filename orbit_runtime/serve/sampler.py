"""The engine in a thread of its own, connected to the front by one stream of records.

Belongs here: from records to the engine's queue and back. Does not belong here: HTTP (`front`), or which name stands
for which adapter (`policies`).

One record is sent per batch step, whatever the number of choices, so the front wakes once per step. The front has an
interpreter of its own, so HTTP takes no time from decoding.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from orbit_runtime.errors import EngineDiedError, GateError, ModelError, OrbitError, UsageError
from orbit_runtime.ports.guard import APIError
from orbit_runtime.rollout.streaming import StreamingEngine
from orbit_runtime.serve.channel import (
    Abort,
    BatchStep,
    ChangeResult,
    Ended,
    Line,
    NameChange,
    Ready,
    Refusal,
    Stop,
    Submit,
)
from orbit_runtime.serve.policies import Policies
from orbit_runtime.serve.requests import from_orbit
from orbit_runtime.types import Request


class Sampler:
    """Owns the engine's thread, from `start` to `close`."""

    def __init__(self, engine: StreamingEngine, policies: Policies, *, seconds: float) -> None:
        """Args: seconds: time limit for one completion."""
        self._engine = engine
        self._policies = policies
        self._seconds = seconds
        self._work = asyncio.Event()
        self._is_closing = False
        self._ended: list[Ended] = []
        """Completions not sent yet. This and the following fields belong to the engine's thread."""
        self._is_telling = False
        """Whether a record is scheduled, to be sent after everything of this step has arrived."""
        self._is_sweeping = False
        self._under_way: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._line = Line(self._hear, self._lose_front)
        self.ready: Ready | None = None
        """The front's message about its start."""
        self.is_heard = threading.Event()
        """Set once `ready` is there, or the front has ended."""
        self.is_front_gone = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None

    def start(self, connection: socket.socket, setup: object) -> None:
        """Args: setup: the first record sent to the front."""
        self._thread = threading.Thread(target=self._run, args=(connection, setup), name="orbit-engine", daemon=True)
        self._thread.start()

    def stop_front(self, seconds: float) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._line.send, Stop(seconds))

    def abort(self) -> None:
        """Aborts all requests in flight and reports that to the front."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._engine.abort)

    def close(self) -> None:
        """Aborts requests in flight and ends the thread. The engine stays. Safe to call twice."""
        self._is_closing = True
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)
        if self._thread is not None:
            self._thread.join(timeout=30)

    # --- the engine's thread ---

    def _run(self, connection: socket.socket, setup: object) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(connection, setup))

    async def _serve(self, connection: socket.socket, setup: object) -> None:
        await self._loop.create_connection(lambda: self._line, sock=connection)
        self._line.send(setup)
        self._engine.listen(self._tell_soon)
        try:
            while not self._is_closing:
                await self._work.wait()
                self._work.clear()
                await self._answer()
        finally:
            self._line.close()

    async def _answer(self) -> None:
        try:
            async for completion in self._engine.completions():
                self._under_way.discard(completion.request_id)
                self._ended.append(
                    (
                        completion.request_id,
                        completion.token_ids_T,
                        completion.logprobs_T,
                        completion.finish_reason,
                        completion.text,
                        completion.alternatives,
                    )
                )
                self._tell_soon()
        except Exception as error:  # whatever it is, the waiting requests must learn of it
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """Fails the requests that the engine lost, or all of them if it cannot go on."""
        is_fatal = not isinstance(error, OrbitError) or isinstance(error, EngineDiedError)
        if not is_fatal:
            # The clients' requests are not at fault.
            error = APIError(502, str(error), code="engine_refused")
        lost = self._under_way if is_fatal else self._under_way - {*self._engine.under_way}
        self._line.send(_refusal(tuple(lost), error, is_fatal=is_fatal))
        self._under_way -= lost
        if self._under_way:
            self._work.set()

    def _hear(self, record: object) -> None:
        match record:
            case Submit():
                self._submit(record)
            case Abort():
                self._engine.abort(record.request_ids)
            case NameChange():
                self._spawn(self._change(record))
            case Ready():
                self.ready = record
                self.is_heard.set()

    def _lose_front(self) -> None:
        self.is_front_gone.set()
        self.is_heard.set()
        self._engine.abort()

    def _end(self) -> None:
        self._engine.abort()
        self._work.set()

    def _submit(self, asked: Submit) -> None:
        ids = range(asked.first_id, asked.first_id + len(asked.choices))
        try:
            with self._policies.slot_of(asked.model) as slot:
                self._engine.submit(
                    [
                        Request(
                            request_id,
                            choice.key,
                            choice.prompt_ids_T,
                            choice.sampling,
                            slot,
                            deadline_seconds=self._seconds,
                            alternatives=choice.alternatives,
                            is_streamed=asked.is_streamed,
                        )
                        for request_id, choice in zip(ids, asked.choices, strict=True)
                    ]
                )
        except Exception as error:  # an error that nobody hears of would leave the client waiting
            self._line.send(_refusal(tuple(ids), error))
            return
        self._under_way.update(ids)
        self._work.set()

    def _tell_soon(self) -> None:
        """Schedules one record for all results of a step."""
        if not self._is_telling:
            self._is_telling = True
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._is_telling = False
        ended, self._ended = self._ended, []
        deltas = self._engine.take_deltas()
        if deltas is not None or ended:
            self._line.send(BatchStep(deltas, ended))
        if ended:
            self._sweep_soon()

    def _sweep_soon(self) -> None:
        if self._policies.retired and not self._is_sweeping:
            self._is_sweeping = True
            self._spawn(self._sweep())

    async def _sweep(self) -> None:
        try:
            await asyncio.to_thread(self._policies.sweep)
        finally:
            self._is_sweeping = False

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _change(self, asked: NameChange) -> None:
        try:
            result = await asyncio.to_thread(self._changed, asked)
        except Exception as error:
            self._line.send(_refusal((), error, call=asked.call))
        else:
            self._line.send(ChangeResult(asked.call, result, tuple(self._policies.all())))
            self._sweep_soon()

    def _changed(self, asked: NameChange) -> dict[str, Any]:
        place = asked.checkpoint if asked.adapter is None else asked.adapter
        if place is None:
            return self._policies.reset(asked.name)
        param = "adapter" if asked.adapter is not None else "checkpoint"
        try:
            self._policies.check_source(place, param)
        except UsageError as error:
            raise APIError(403, str(error), param=param) from None
        if asked.checkpoint is not None:
            try:
                return self._policies.load_checkpoint(asked.checkpoint)
            except (ModelError, GateError) as error:
                raise APIError(422, str(error), param=param, code="checkpoint_refused") from None
        served, proof = self._policies.load(asked.name, place)
        return {**served.to_json(), "proof": proof.to_json()}


def _refusal(
    request_ids: Sequence[int], error: Exception, *, call: int | None = None, is_fatal: bool = False
) -> Refusal:
    if isinstance(error, OrbitError) and not is_fatal:
        error = from_orbit(error)
    if not isinstance(error, APIError):
        what = f"the engine has failed: {type(error).__name__}"
        error = APIError(503 if call is None else 500, what, code="engine_failed")
    return Refusal(tuple(request_ids), error.status, error.message, error.code, error.param, call, is_fatal)
