"""HTTP servers of all ports, with limits that hold before any request is read: on its head, and on connections.

Belongs here: the settings that all ports share, and what one connection may take. Does not belong here: who may ask
(`guard`).
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from orbit_runtime.ports.guard import APIError

HEAD_BYTES, HEAD_LINES = 1 << 16, 128
"""Most bytes of a request's head, and its most headers; trailers of a body count too."""
HEAD_SECONDS = 30.0
"""Time limit for a head: from the start of a connection, and in it from the first byte of each further request."""
PEER_CONNECTIONS = 4096
"""Most connections of one address."""
SPARE_FILES = 64
"""Open files that one address leaves to others."""


class LimitedHTTP(HttpToolsProtocol):
    """One connection of a port."""

    def __init__(self, peers: Counter[str], most: int, seconds: float, **given: Any) -> None:
        """
        Args:
            peers: connections of each address, shared by those of a port.
            most: most connections of one address.
            seconds: time limit for a head.
        """
        super().__init__(**given)
        self._peers = peers
        self._most = most
        self._seconds = seconds
        self._is_in_head = True
        self._timer: asyncio.TimerHandle | None = None
        self._framing = 0
        """Bytes since the last part of a body or the end of a request: those of a head, or of trailers."""
        self._is_too_large = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._peer = self.client[0] if self.client else ""
        self._peers[self._peer] += 1
        if self._peers[self._peer] > self._most:
            self._refuse(APIError(429, f"{self._peer} has {self._most} connections, as many as it may"))
        else:
            self._watch_head()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._peers[self._peer] -= 1
        if not self._peers[self._peer]:
            del self._peers[self._peer]
        self._forget_head()

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._watch_head()
        self._framing += len(data)
        super().data_received(data)
        if self._framing > HEAD_BYTES or len(self.headers or ()) > HEAD_LINES:
            self._refuse(_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._watch_head()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        self._is_too_large = size > HEAD_BYTES or len(self.headers) > HEAD_LINES
        if self._is_too_large:
            # The parser turns it into one of its own errors, which is then answered.
            raise _too_large()
        self._is_in_head = False
        self._forget_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._framing = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._framing = 0
        self._is_in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(_too_large() if self._is_too_large else APIError(400, msg))

    def _watch_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._seconds, self._end_late)

    def _forget_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_late(self) -> None:
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(APIError(408, f"the head of a request took longer than {self._seconds:g} s"))
        else:
            # The answer to the request before is not disturbed.
            self._watch_head()

    def _refuse(self, error: APIError) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            said = orjson.dumps(error.to_json())
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(said)
            self.transport.write(STATUS_LINE[error.status] + head + said)
        self.transport.close()


def build_server(
    app: Callable[..., Any], *, most: int = PEER_CONNECTIONS, head_seconds: float = HEAD_SECONDS, **settings: Any
) -> uvicorn.Server:
    """A server of a port, which listens when it is run.

    Args:
        app: an ASGI application.
        most: most connections of one address; fewer if the limit of open files would leave none to others.
        settings: those of uvicorn that are the port's own.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY:
        most = min(most, max(files - SPARE_FILES, files // 2))
    http = partial(LimitedHTTP, Counter(), most, head_seconds)
    config = uvicorn.Config(
        app, http=cast(Any, http), log_config=None, access_log=False, ws="none", workers=1, server_header=False,
        **settings,
    )  # fmt: skip
    return uvicorn.Server(config)


def _too_large() -> APIError:
    return APIError(431, f"a request's head has at most {HEAD_BYTES} bytes and {HEAD_LINES} headers")
