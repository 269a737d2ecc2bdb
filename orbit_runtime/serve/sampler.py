"""The engine in a thread of its own, asked by the front over one stream of records.

Belongs here: from records to the engine's queue and back. Does not belong here: HTTP (`front`), or which name is which
adapter (`policies`).

One record leaves per step of the batch, whatever the number of choices, so that the front wakes once per step; and the
front has an interpreter of its own, so that what HTTP takes is not taken from decoding.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from orbit_runtime.errors import OrbitError, UsageError
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.serve.channel import (
    Abort,
    Change,
    Changed,
    Event,
    Ready,
    Refusal,
    Step,
    Stop,
    Submit,
    pack,
    receive,
)
from orbit_runtime.serve.errors import APIError, from_orbit
from orbit_runtime.serve.policies import Policies
from orbit_runtime.types import Completion, Request


class Sampler:
    """Owns the engine's thread, from `start` to `close`."""

    def __init__(self, engine: TorchEngine, policies: Policies, *, seconds: float) -> None:
        """Args: seconds: that one completion may take."""
        self._engine = engine
        self._policies = policies
        self._seconds = seconds
        self._work = asyncio.Event()
        self._is_closing = False
        self._streamed: dict[int, int] = {}
        """Tokens that the front has, by streamed request. The engine's thread's, as is what follows."""
        self._events: list[Event] = []
        self._under_way: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None
        self.ready: Ready | None = None
        """What the front said of its start."""
        self.is_heard = threading.Event()
        """`ready` is there, or the front has ended."""
        self.is_front_gone = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None

    def start(self, connection: socket.socket, setup: object) -> None:
        """Args: setup: the first record that the front gets."""
        self._thread = threading.Thread(target=self._run, args=(connection, setup), name="orbit-engine", daemon=True)
        self._thread.start()

    def stop_front(self, seconds: float) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._send, Stop(seconds))

    def abort(self) -> None:
        """Everything that is under way; the front hears of it."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._engine.abort)

    def close(self) -> None:
        """Aborts what is under way and ends the thread. The engine stays. Safe to call twice."""
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
        reader, self._writer = await asyncio.open_connection(sock=connection)
        self._send(setup)
        reading = asyncio.create_task(self._read(reader))
        try:
            while not self._is_closing:
                await self._work.wait()
                self._work.clear()
                await self._answer()
        finally:
            reading.cancel()
            self._writer.close()

    async def _answer(self) -> None:
        try:
            async for completion in self._engine.completions():
                if not self._events:
                    # After the others of this step.
                    self._loop.call_soon(self._tell)
                self._events.append(self._ended(completion))
        except Exception as error:  # whatever it is, those who wait must hear of it
            self._send(_refusal(tuple(self._under_way), error, is_fatal=True))
            self._under_way.clear()
            self._streamed.clear()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (record := await receive(reader)) is not None:
            match record:
                case Submit():
                    self._submit(record)
                case Abort():
                    self._engine.abort(record.request_ids)
                case Change():
                    task = asyncio.create_task(self._change(record))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case Ready():
                    self.ready = record
                    self.is_heard.set()
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
                        )
                        for request_id, choice in zip(ids, asked.choices, strict=True)
                    ]
                )
        except Exception as error:  # an error that nobody hears of would leave the client waiting
            self._send(_refusal(tuple(ids), error))
            return
        self._under_way.update(ids)
        if asked.is_streamed:
            if not self._streamed:
                self._loop.call_soon(self._tell_streamed)
            self._streamed.update(dict.fromkeys(ids, 0))
        self._work.set()

    def _tell_streamed(self) -> None:
        """Once between two steps of the batch, as long as a client wants its tokens one by one."""
        if not self._streamed:
            return
        for request_id, tokens, logprobs in self._engine.since(self._streamed):
            self._streamed[request_id] += len(tokens)
            self._events.append((request_id, tokens.tobytes(), logprobs.tobytes(), None, ""))
        self._tell()
        self._loop.call_soon(self._tell_streamed)

    def _ended(self, completion: Completion) -> Event:
        self._under_way.discard(completion.request_id)
        had = self._streamed.pop(completion.request_id, 0)
        tokens, logprobs = completion.token_ids_T[had:], completion.logprobs_T[had:]
        return completion.request_id, tokens.tobytes(), logprobs.tobytes(), completion.finish_reason, completion.text

    def _tell(self) -> None:
        if self._events:
            self._send(Step(self._events))
            self._events = []
            self._policies.sweep()

    async def _change(self, asked: Change) -> None:
        try:
            result = await asyncio.to_thread(self._changed, asked)
        except Exception as error:
            self._send(_refusal((), error, call=asked.call))
        else:
            self._send(Changed(asked.call, result, tuple(self._policies.all())))

    def _changed(self, asked: Change) -> dict[str, Any]:
        if asked.adapter is None:
            return self._policies.reset(asked.name).to_json()
        try:
            self._policies.check_source(asked.adapter)
        except UsageError as error:
            raise APIError(403, str(error), param="adapter") from None
        served, proof = self._policies.load(asked.name, asked.adapter)
        return {**served.to_json(), "proof": proof.to_json()}

    def _send(self, record: object) -> None:
        # A front that has ended needs nothing any more.
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack(record))


def _refusal(
    request_ids: Sequence[int], error: Exception, *, call: int | None = None, is_fatal: bool = False
) -> Refusal:
    if isinstance(error, OrbitError) and not is_fatal:
        error = from_orbit(error)
    if not isinstance(error, APIError):
        what = f"the engine has failed: {type(error).__name__}"
        error = APIError(503 if call is None else 500, what, code="engine_failed")
    return Refusal(tuple(request_ids), error.status, error.message, error.code, error.param, call, is_fatal)
