"""One side of a run behind HTTP: runs each call once, in order, in one thread, for one orchestrator.

    GET  /health         that it lives, nothing else; no token
    GET  /facts          what this is: kind, versions, manifest, base, threads
    GET  /look/<name>    how it is now, while a call goes on
    POST /open           begins a session, in the state that a run's first step expects
    POST /call/<name>    the session's next call, by number; a repeated call is answered again but not run again
    POST /close          ends the session

A long call is answered with 202 after a while and asked for again by its number, which tells a machine that is gone
from one that computes; its content is the seconds since the last sign of life. Belongs here: sessions, numbers,
threads. Does not belong here: what a call does (`calls`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from starlette.types import Receive, Scope, Send

from orbit_runtime.errors import (
    CollectiveError,
    EngineDiedError,
    GPUFaultError,
    InternalError,
    OrbitError,
    OutOfMemoryError,
    OutputError,
    StalledError,
    gpu_fault,
    is_out_of_memory,
)
from orbit_runtime.observability.server import LISTEN_FIX, HTTPServer, listen, serve_app
from orbit_runtime.ports.guard import Guard
from orbit_runtime.services.frames import Frame, chunks, frame, num_bytes, unpack
from orbit_runtime.workers.child.heartbeat import silent_seconds

WAIT_SECONDS = 20.0
"""Longest wait for a result before the client must ask again."""
READ_SECONDS = 600.0
"""Limit for receiving a body."""
BODY_BYTES = 1 << 38
"""Larger than a step's samples, or an adapter or state if no store is shared."""
MOST_DIGITS = 20
"""Of the number of a call."""
NAP_SECONDS = 0.2
LOST = (CollectiveError, EngineDiedError, GPUFaultError, StalledError)
"""Errors after which a side cannot go on: its device, or a process of its own, is gone. Its successor takes over."""
GOES = 503
"""The status of every response of a side that is ending."""
BOOT, SESSION, CALL = "x-orbit-boot", "x-orbit-session", "x-orbit-call"
EMPTY: Mapping[str, Callable[[], Any]] = MappingProxyType({})
_log = logging.getLogger("orbit.services")


@dataclass
class _Session:
    name: str
    run: str
    """Address of its run folder."""
    execution: int
    opened: Future[Frame]
    number: int = 0
    """Number of the newest call."""
    answer: Future[Frame] = field(default_factory=Future)


@dataclass(frozen=True)
class _Refused(Exception):
    status: int
    error: OrbitError


class Host:
    """Two threads: the caller of `work` computes; the HTTP thread does everything else."""

    def __init__(
        self,
        facts: Mapping[str, Any],
        calls: Mapping[str, Callable[..., Any]],
        reset: Callable[[], None],
        looks: Mapping[str, Callable[[], Any]] = EMPTY,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            facts: facts for clients; plain values.
            reset: restores the state that a run's first step expects.
            looks: by name, plain values that change; read in a thread of its own while calls go on.
            is_over: whether the call that has just failed was the last that can be computed here, whatever its error.
        """
        self.boot = uuid.uuid4().hex
        self._facts = dict(facts)
        self._calls = calls
        self._reset = reset
        self._looks = looks
        self._is_over = is_over
        self._session: _Session | None = None
        self._lost: OrbitError | None = None
        self._tasks: queue.SimpleQueue[tuple[Future[Frame], Callable[[], Any]]] = queue.SimpleQueue()

    # --- the thread that computes ---

    def work(self, stopped: Callable[[], bool]) -> None:
        """Runs calls until it is stopped.

        Raises:
            OrbitError: one of `LOST` (80 to 83): the client waits for the next process. Or the error, answered, of a
                call after which this side is over.
        """
        while not stopped():
            try:
                future, task = self._tasks.get(timeout=NAP_SECONDS)
            except queue.Empty:
                continue
            try:
                future.set_result(frame(task()))
            except OrbitError as error:
                self._fail(future, error)
            except Exception as error:
                _log.exception("a call failed")
                told = f"{type(error).__name__}: {error}"
                kind = OutOfMemoryError if is_out_of_memory(error) else InternalError
                self._fail(future, gpu_fault(error) or kind(f"{self._facts['kind']}: {told[:500]}"))

    def _fail(self, future: Future[Frame], error: OrbitError) -> None:
        if isinstance(error, LOST) or self._is_over():
            self._lost = error
        future.set_exception(error)
        if self._lost is not None:
            raise error

    # --- the thread of HTTP ---

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: bytes | Frame
        try:
            status, answer = await self._answer(scope, (await receive())["body"])
        except _Refused as refused:
            status, answer = refused.status, json.dumps(refused.error.to_json()).encode()
        except LOST as error:
            status, answer = GOES, json.dumps(error.to_json()).encode()
        except OrbitError as error:
            status, answer = 422, json.dumps(error.to_json()).encode()
        parts: Frame = [answer] if isinstance(answer, bytes) else answer
        headers = [(BOOT.encode(), self.boot.encode()), (b"content-length", str(num_bytes(parts)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for chunk in chunks(parts):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _answer(self, scope: Scope, body: bytes) -> tuple[int, bytes | Frame]:
        method, path = scope["method"], str(scope["path"])
        if (method, path) == ("GET", "/health"):
            return 200, b'{"ok":true}'
        if self._lost is not None:
            raise _Refused(GOES, self._lost)
        if (method, path) == ("GET", "/facts"):
            return 200, json.dumps(self._facts).encode()
        look = self._looks.get(path.removeprefix("/look/"))
        if method == "GET" and look is not None:
            return 200, json.dumps(await asyncio.to_thread(look)).encode()
        if method == "POST":
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            if path == "/open":
                return await _waited(self._open(unpack(body)))
            if path == "/close":
                if self._session is not None and self._session.name == headers.get(SESSION):
                    self._session = None
                return 200, b""
            if path.startswith("/call/"):
                return await _waited(self._call(path.removeprefix("/call/"), headers, body))
        raise _Refused(404, InternalError(f"there is no {method} {path}"))

    def _open(self, asked: Any) -> Future[Frame]:
        try:
            name, run, execution = str(asked["session"]), str(asked["run"]), int(asked["execution"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise _Refused(400, InternalError("a session has a name, a run and an execution")) from None
        held = self._session
        if held is not None and held.name == name:
            return held.opened
        if held is not None and held.run != run:
            raise _Refused(
                409,
                OutputError(
                    f"this {self._facts['kind']} process works for the run in {held.run}",
                    where=run,
                    fix="start another one, or restart this one if that run is over",
                ),
            )
        if held is not None and execution < held.execution:
            raise _Refused(409, _taken_over(held))
        self._session = _Session(name, run, execution, self._submit(self._reset))
        return self._session.opened

    def _call(self, name: str, headers: Mapping[str, str], body: bytes) -> Future[Frame]:
        held, number = self._session, headers.get(CALL, "")
        if held is None or headers.get(SESSION) != held.name:
            raise _Refused(
                409,
                _taken_over(held)
                if held
                else OutputError("there is no such session", fix="start the orchestrator again"),
            )
        if not (number.isdecimal() and len(number) < MOST_DIGITS) or name not in self._calls:
            raise _Refused(400, InternalError(f"there is no call {name!r} with the number {number[:MOST_DIGITS]!r}"))
        if int(number) == held.number and held.number:
            return held.answer
        if int(number) != held.number + 1:
            raise _Refused(409, InternalError(f"call {number} follows call {held.number}"))
        arguments = unpack(body)
        if not isinstance(arguments, list):
            raise _Refused(400, InternalError("a call has a list of arguments"))
        held.number, held.answer = int(number), self._submit(lambda: self._calls[name](*arguments))
        return held.answer

    def _submit(self, task: Callable[[], Any]) -> Future[Frame]:
        future: Future[Frame] = Future()
        self._tasks.put((future, task))
        return future


def _taken_over(by: _Session) -> OutputError:
    return OutputError(
        f"execution {by.execution} of the run took over",
        where=by.run,
        fix="nothing here: the newer execution continues the run",
    )


async def _waited(future: Future[Frame]) -> tuple[int, bytes | Frame]:
    try:
        return 200, await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), WAIT_SECONDS)
    except TimeoutError:
        if future.done():
            raise
        return 202, f"{silent_seconds():.1f}".encode()


def start_host(host: Host, address: str, port: int, token: str | None, *, body_bytes: int = BODY_BYTES) -> HTTPServer:
    """Listens in a thread of its own; calls wait for `Host.work`.

    Raises:
        OutputError: the port is taken, or the address is not one of this machine's.
    """
    guard = Guard(host, token=token, body_bytes=body_bytes, read_seconds=READ_SECONDS, takes_json=False)
    return serve_app(guard, listen(address, port, "--listen", LISTEN_FIX), address, LISTEN_FIX)
