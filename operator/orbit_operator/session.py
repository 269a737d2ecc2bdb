"""The HTTP session that kopf lists and watches with: answers pass through the intake before kopf parses them.

Belongs here: HTTP. Does not belong here: what becomes of an object (`intake`).
kopf takes any aiohttp session from its login handler, and aiohttp any class of answers. Left to itself kopf parses
every object whole, into ten times the size of its text, and then spends as long again on an event that most often says
nothing new.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import kopf
import orjson

from orbit_operator.intake import Intake


def open_session(info: kopf.ConnectionInfo, intake: Intake) -> kopf.AiohttpSession:
    """As kopf opens one by itself, but for the class of its answers. kopf closes it."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        proxy=info.proxy_url,
        trust_env=bool(info.trust_env),
        response_class=build_response_class(intake),
    )
    return kopf.AiohttpSession(
        server=info.server,
        default_namespace=info.default_namespace,
        priority=info.priority,
        expiration=info.expiration,
        aiohttp_session=session,
    )


def build_response_class(intake: Intake) -> type[aiohttp.ClientResponse]:
    """Lists come to kopf by `json`, watches by the lines of `content`."""

    class Answer(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            await super().start(connection)
            if self.status == 200 and self.url.query.get("watch") == "true":
                self.content = Lines(self.content, intake.take_line)  # type: ignore[assignment]
            return self

        async def json(self, **options: Any) -> Any:
            return intake.take_list(await super().json(**{**options, "loads": orjson.loads}))

    return Answer


class Lines:
    """A stream whose lines are others: `take` says which, `None` leaves one out. All else is the stream's own."""

    def __init__(self, stream: aiohttp.StreamReader, take: Callable[[bytes], bytes | None]) -> None:
        self._stream = stream
        self._take = take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        rest = b""
        async for chunk in self._stream.iter_chunked(size):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                taken = self._take(line) if line else None
                if taken is not None:
                    yield taken + b"\n"
        if rest:
            yield rest
