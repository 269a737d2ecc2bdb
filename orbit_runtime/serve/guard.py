"""Checks every request before a route sees it: its token or its origin, and the limits on its body.

Belongs here: early refusals, counting every response. Does not belong here: the content of a body.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

import orjson
from starlette.types import Message, Receive, Scope, Send

from orbit_runtime.observability.origins import foreign
from orbit_runtime.serve.errors import APIError
from orbit_runtime.serve.metrics import ServeMetrics

OPEN_PATHS = ("/health",)
"""Paths that need no token: they reveal only that the server lives."""
DRAINED_BYTES, DRAIN_SECONDS = 1 << 26, 10.0
"""Limits for reading a refused body to its end: a client that still sends would take a closed connection for a network
fault."""


Answering = Callable[[Scope, bytes, Receive, Send], Awaitable[None]]
"""Handles a request whose body was read. `receive` can then report only that the client has left."""


class Guard:
    """The ASGI application."""

    def __init__(
        self,
        app: Answering,
        metrics: ServeMetrics,
        *,
        token: str | None,
        body_bytes: int,
        read_seconds: float,
        routes: Collection[str],
        takes_json: bool = True,
    ) -> None:
        """
        Args:
            token: None to allow every program of this machine, but no page of another site in a browser on it.
            routes: paths with their own metrics label; all others are counted together.
            takes_json: whether bodies are JSON, which such a page cannot send without a preflight request.
        """
        self._app = app
        self._metrics = metrics
        self._token = None if token is None else token.encode()
        self._body_bytes = body_bytes
        self._read_seconds = read_seconds
        self._routes = frozenset(routes)
        self._takes_json = takes_json

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # Websockets are not supported.
            await send({"type": "websocket.close", "code": 1000})
            return
        started, status = time.monotonic(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            try:
                self._check_token(scope)
                body = await self._read(scope, receive)
            except APIError as error:
                # A body that is late is not waited for a second time.
                if error.status != 408:
                    await _drain(receive)
                await _answer(watched, error)
                return
            if body is not None:
                await self._app(scope, body, receive, watched)
        finally:
            route = scope["path"] if scope["path"] in self._routes else "other"
            self._metrics.answered(route, status, time.monotonic() - started)

    def _check_token(self, scope: Scope) -> None:
        if scope["path"] in OPEN_PATHS:
            return
        if self._token is None:
            self._check_origin(scope)
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        # Compared in constant time for any input, so that the time of a refusal reveals nothing.
        is_equal = hmac.compare_digest(token.strip(), self._token)
        if scheme.lower() != b"bearer" or not is_equal:
            raise APIError(401, "the bearer token is missing or wrong", code="invalid_api_key")

    def _check_origin(self, scope: Scope) -> None:
        if reason := foreign(scope):
            raise APIError(403, f"{reason}: this server needs a token for that", code="foreign_origin")
        kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"application/json")
        if self._takes_json and scope["method"] == "POST" and kind.partition(b";")[0].strip() != b"application/json":
            message = f"the body is {kind.decode('latin-1')[:200]!r}: send `Content-Type: application/json`"
            raise APIError(415, message, code="unsupported_media_type")

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None if the client has left."""
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if announced.isdigit() and int(announced) > self._body_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._read_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    if size > self._body_bytes:
                        raise self._too_large()
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise APIError(408, f"the body took longer than {self._read_seconds:g} s") from None

    def _too_large(self) -> APIError:
        return APIError(413, f"the body has more than {self._body_bytes} bytes", code="body_too_large")


async def _drain(receive: Receive) -> None:
    size, more = 0, True
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while more and size < DRAINED_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                more = message.get("more_body", False)


async def _answer(send: Send, error: APIError) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps(error.to_json())})
