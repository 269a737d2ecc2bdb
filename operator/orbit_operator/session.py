"""The HTTP session that kopf lists and watches with: answers pass through the intake before kopf parses them.

Belongs here: HTTP. Does not belong here: what becomes of an object (`intake`), or of a list or a refusal (`sight`).
kopf takes any aiohttp session from its login handler, and aiohttp any class of answers. Left to itself kopf parses
every object whole, into ten times the size of its text, and then spends as long again on an event that most often says
nothing new. A refusal in one namespace would end it for all of them, so there it is told that there is nothing, and a
little later to list anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import kopf
import orjson

from orbit_operator.intake import Intake
from orbit_operator.sight import EVERYWHERE, PLURALS, Sight

LIST_ANEW = orjson.dumps(
    {"type": "ERROR", "object": {"kind": "Status", "apiVersion": "v1", "code": 410, "reason": "Expired"}}
)
NOTHING = {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "0"}, "items": []}


def open_session(info: kopf.ConnectionInfo, intake: Intake, sight: Sight) -> kopf.AiohttpSession:
    """As kopf opens one by itself, but for the class of its answers. kopf closes it."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        proxy=info.proxy_url,
        trust_env=bool(info.trust_env),
        response_class=build_response_class(intake, sight),
    )
    return kopf.AiohttpSession(
        server=info.server,
        default_namespace=info.default_namespace,
        priority=info.priority,
        expiration=info.expiration,
        aiohttp_session=session,
    )


def build_response_class(intake: Intake, sight: Sight) -> type[aiohttp.ClientResponse]:
    """Lists come to kopf by `json`, watches by the lines of `content`."""

    class Answer(aiohttp.ClientResponse):
        place: tuple[str, str] | None = None
        """Namespace, or `EVERYWHERE`, and plural of what was listed or watched."""

        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            await super().start(connection)
            self.place = read_place(self.url.path)
            watches = self.url.query.get("watch") == "true"
            if self.place is None:
                return self
            if self.status == 403 and self.place[0] != EVERYWHERE:
                sight.refuse(*self.place, why=_read_message(await self.read()))
                self.status = 200
            elif self.status == 410 and not watches:
                # Between two pages the rest has become too old: kopf would end.
                sight.expire(*self.place)
                self.status = 200
            elif self.status != 200 or not watches:
                return self
            if sight.misses(*self.place):
                self.content = Refused(self.content, sight.pause(*self.place))  # type: ignore[assignment]
            else:
                sight.watch(*self.place)
                self.content = Lines(self.content, intake.take_line)  # type: ignore[assignment]
            return self

        async def json(self, **options: Any) -> Any:
            if isinstance(self.content, Refused):
                return NOTHING
            answer = intake.take_list(await super().json(**{**options, "loads": orjson.loads}))
            if self.status == 200 and self.place is not None and not (answer.get("metadata") or {}).get("continue"):
                sight.list_whole(*self.place)
            return answer

    return Answer


def read_place(path: str) -> tuple[str, str] | None:
    """Namespace and plural in a path such as `/apis/batch/v1/namespaces/lab/jobs`; `EVERYWHERE` in one without."""
    *_, word, namespace, plural = ("", "", "", *path.split("/"))
    if plural not in PLURALS:
        return None
    if word == "namespaces":
        return namespace, plural
    return None if namespace == "namespaces" else (EVERYWHERE, plural)


def _read_message(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["message"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return body[:200].decode(errors="replace")


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


class Refused(Lines):
    """A stream that says, after a pause, that its version is too old: whoever watches then lists anew."""

    def __init__(self, stream: aiohttp.StreamReader, seconds: float) -> None:
        super().__init__(stream, lambda line: line)
        self._seconds = seconds

    async def iter_chunked(self, _size: int) -> AsyncIterator[bytes]:
        await asyncio.sleep(self._seconds)
        yield LIST_ANEW + b"\n"
