"""The HTTP session with which kopf lists and watches: responses pass through the intake before kopf parses them.

By itself, kopf parses every object whole, into ten times the size of its text, and then spends as long again on an
event that mostly says nothing new. A refusal in one namespace would end kopf for all namespaces; so we answer with an
empty list there, and a little later ask kopf to list again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import kopf
import orjson

from orbit_operator.intake import Intake
from orbit_operator.namespaces import EVERYWHERE, PLURALS, NamespaceView

LIST_ANEW = orjson.dumps(
    {"type": "ERROR", "object": {"kind": "Status", "apiVersion": "v1", "code": 410, "reason": "Expired"}}
)
NOTHING = {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "0"}, "items": []}


def open_session(info: kopf.ConnectionInfo, intake: Intake, sight: NamespaceView) -> kopf.AiohttpSession:
    """Opens a session as kopf does, but with our response class. kopf closes it."""
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


def build_response_class(intake: Intake, sight: NamespaceView) -> type[aiohttp.ClientResponse]:
    """The response class. kopf reads lists by `json`, and watches by the lines of `content`."""

    class Answer(aiohttp.ClientResponse):
        place: tuple[str, str] | None = None
        """Namespace, or `EVERYWHERE`, and plural that this response lists or watches."""

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
                # The continuation of a paged list has expired: kopf would end.
                sight.expire(*self.place)
                self.status = 200
            elif self.status != 200 or not watches:
                return self
            if sight.misses(*self.place):
                self.content = ExpiredStream(self.content, sight.pause(*self.place))  # type: ignore[assignment]
            else:
                sight.watch(*self.place)
                self.content = FilteredLines(self.content, intake.take_line)  # type: ignore[assignment]
            return self

        async def json(self, **options: Any) -> Any:
            if isinstance(self.content, ExpiredStream):
                return NOTHING
            answer = intake.take_list(await super().json(**{**options, "loads": orjson.loads}))
            if self.status == 200 and self.place is not None and not (answer.get("metadata") or {}).get("continue"):
                sight.list_whole(*self.place)
            return answer

    return Answer


def read_place(path: str) -> tuple[str, str] | None:
    """Namespace and plural in a path such as `/apis/batch/v1/namespaces/lab/jobs`; `EVERYWHERE` without a namespace."""
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


class FilteredLines:
    """A stream with its lines replaced by `take`, which drops a line by returning `None`. All else is the stream's."""

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


class ExpiredStream(FilteredLines):
    """A stream that reports, after a pause, that its version is too old, so that the watcher lists again."""

    def __init__(self, stream: aiohttp.StreamReader, seconds: float) -> None:
        super().__init__(stream, lambda line: line)
        self._seconds = seconds

    async def iter_chunked(self, _size: int) -> AsyncIterator[bytes]:
        await asyncio.sleep(self._seconds)
        yield LIST_ANEW + b"\n"
