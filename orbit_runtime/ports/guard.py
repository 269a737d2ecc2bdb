"""Checks every request of a port before a route sees it: its token or its origin, and the limits on its body.

Belongs here: early refusals, and the form in which all ports refuse. Does not belong here: the content of a body, what
holds before a request is read (`server`).
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
"""Addresses that mean all of a machine's → the address for requests from this machine."""
FOREIGN_FIX = (
    "a port without a token answers this machine alone, such as through `kubectl port-forward` or ssh -L, and no page "
    "of another site"
)
OPEN_PATHS = ("/health",)
"""Paths that need no token: they reveal only that the server lives."""
DRAINED_BYTES, DRAIN_SECONDS = 1 << 26, 10.0
"""Limits for reading a refused body to its end: a client that still sends would take a closed connection for a network
fault."""

BODY_BYTES, READ_SECONDS = 1 << 20, 30.0
"""Most bytes of a body, and the time that it may take."""
NO_TOKENS: Mapping[str, str] = MappingProxyType({})


TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "server_error",
}


class APIError(Exception):
    """An error response. Example: `APIError(404, "there is no model 'x'", param="model")`"""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def to_json(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Guard:
    """An ASGI application around another one, which gets each body whole."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        path_tokens: Mapping[str, str] = NO_TOKENS,
        body_bytes: int = BODY_BYTES,
        read_seconds: float = READ_SECONDS,
        takes_json: bool = True,
        answered: Callable[[str, int, float], None] = lambda path, status, seconds: None,
    ) -> None:
        """
        Args:
            token: None to allow every program of this machine, but no page of another site in a browser on it.
            path_tokens: path → the only token that opens it; such a token opens all other paths too.
            takes_json: whether bodies are JSON, which such a page cannot send without a preflight request.
            answered: called after each response with path, status and seconds.
        """
        self._app = app
        self._token = None if token is None else token.encode()
        self._path_tokens = {path: each.encode() for path, each in path_tokens.items()}
        self._body_bytes = body_bytes
        self._read_seconds = read_seconds
        self._takes_json = takes_json
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # The start and the end of the application: servers accept no websockets.
            await self._app(scope, receive, send)
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
                await self._app(scope, _replayed(body, receive), watched)
        finally:
            self._answered(scope["path"], status, time.monotonic() - started)

    def _check_token(self, scope: Scope) -> None:
        path = scope["path"]
        if path in OPEN_PATHS:
            return
        needed = self._path_tokens.get(path, self._token)
        if needed is None:
            self._check_origin(scope)
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if scheme.lower() == b"bearer":
            # Compared in constant time for any input, so that the time of a refusal reveals nothing.
            known = [each for each in (needed, self._token or b"", *self._path_tokens.values()) if each]
            equal = [hmac.compare_digest(token.strip(), each) for each in known]
            if equal[0] or (any(equal) and path not in self._path_tokens):
                return
            if any(equal):
                raise APIError(403, f"this token may not use {path}", code="token_of_another_right")
        raise APIError(401, "the bearer token is missing or wrong", code="invalid_api_key")

    def _check_origin(self, scope: Scope) -> None:
        if reason := foreign(scope):
            raise APIError(403, f"{reason}: {FOREIGN_FIX}", code="foreign_origin")
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


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Hands over a body that was read; after it there is only the news that the client has left."""
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_rest() -> Message:
        return whole.pop() if whole else await receive()

    return receive_rest


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


def foreign(scope: Mapping[str, Any]) -> str:
    """Why an ASGI request is refused as foreign to this machine's programs; empty if it is not.

    A page elsewhere may send requests to this machine (its browser says whose page it is), and read the answers under a
    name that its owner makes this machine's (which is then the host that the request names).
    """
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
    if other := next((each for each in hosts if _name(f"//{each}") not in LOOPBACK), ""):
        return f"the request is to {other[:200]!r}, and not to 127.0.0.1 or localhost"
    if other := next((each for each in origins if [each.partition("://")[2]] != hosts), ""):
        return f"the request is from a page of {other[:200]!r}"
    return ""


def local_host(host: str) -> str:
    """The host in an address for requests from this machine."""
    return EVERYWHERE.get(host, f"[{host}]" if ":" in host else host)


def _name(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None
