"""HTTP to one server: JSON in, JSON out, with a separate error for each kind of failure.

Belongs here: connections, which failures mean that the server is lost, and the questions that every kind of server
answers alike. Does not belong here: what only one kind is asked.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any

import httpx
import orjson

from orbit_runtime.adapters.files import seconds_for
from orbit_runtime.errors import CredentialsError, GateError, UnsupportedError
from orbit_runtime.rollout.server_types import LostError, ServerHandle
from orbit_runtime.rollout.streaming import take_events

REQUEST_SECONDS = 3600.0
"""Longest that one request other than a completion may take. A server that hangs is noticed long before, by asking for
its progress."""
ASK_SECONDS = 60.0
"""Longest that a question may take. What has an adapter's bytes to work on gets more, by their number."""
METRICS_SECONDS = 2.0
"""A scrape waits for it, and Prometheus gives up after ten by default."""
CONNECT_SECONDS = 10.0
SHOWN = 500


def build_client() -> httpx.AsyncClient:
    """One for all servers of a run; proxies of the environment are for other things."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    return httpx.AsyncClient(
        timeout=httpx.Timeout(REQUEST_SECONDS, connect=CONNECT_SECONDS), limits=limits, trust_env=False
    )


class Wire:
    """A connection to one server, at its current address: a restarted one has another port."""

    def __init__(self, client: httpx.AsyncClient, server: ServerHandle, where: str = "spec.rollout.endpoints") -> None:
        """Args: where: the manifest names the server."""
        self._client = client
        self._server = server
        self._where = where

    @property
    def url(self) -> str:
        return self._server.url

    async def post(self, path: str, body: Mapping[str, Any], *, num_bytes: int = 0) -> Any:
        """Raises LostError, or GateError for a request that the server refuses.

        Args:
            num_bytes: that the server moves or reads before it answers.
        """
        return self._read(path, await self._send("POST", path, json=body, timeout=self._longest(num_bytes)))

    async def act(self, path: str, body: Mapping[str, Any], *, num_bytes: int = 0) -> None:
        """`post` where the answer is only that it was done."""
        self._check(path, await self._send("POST", path, json=body, timeout=self._longest(num_bytes)))

    def _longest(self, num_bytes: int) -> httpx.Timeout:
        default = self._client.timeout
        read = None if default.read is None else default.read + seconds_for(num_bytes)
        return httpx.Timeout(connect=default.connect, write=default.write, pool=default.pool, read=read)

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Events of an answer that comes bit by bit (`text/event-stream`), as JSON, until `[DONE]` or its end.

        Silence is no failure here: a long answer under load may wait long for its next token.

        Raises:
            LostError: the connection ended, or an event was cut off.
            GateError: the request is refused, or an event is not JSON.
        """
        url, headers = f"{self.url}{path}", dict(self._server.headers)
        patient = httpx.Timeout(None, connect=CONNECT_SECONDS, pool=None)
        try:
            async with self._client.stream("POST", url, headers=headers, json=body, timeout=patient) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    self._check(path, answer)
                if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                    raise GateError(f"{path} was answered with something that is no stream of events", where="rollout")
                held = bytearray()
                async for piece in answer.aiter_bytes():
                    for event in take_events(held, piece):
                        if event == "[DONE]":
                            return
                        yield _event(path, event)
        except httpx.InvalidURL as error:
            raise LostError(f"{self.url}: {error}") from None
        except httpx.RequestError as error:
            raise LostError(f"{url}: {error or type(error).__name__}") from None

    async def get(self, path: str, *, num_bytes: int = 0) -> Any:
        return self._read(path, await self._send("GET", path, timeout=ASK_SECONDS + seconds_for(num_bytes)))

    async def text(self, path: str, seconds: float) -> str:
        """Raises LostError, or GateError where it is refused."""
        answer = await self._send("GET", path, timeout=seconds)
        self._check(path, answer)
        return answer.text

    async def answers(self, path: str, seconds: float) -> bool:
        """Whether it answers 200 in this time."""
        try:
            return (await self._send("GET", path, timeout=seconds)).status_code == 200
        except LostError:
            return False

    def _read(self, path: str, answer: httpx.Response) -> Any:
        self._check(path, answer)
        # A teacher's likeliest tokens may be hundreds of megabytes, which hold up every thread while they are read.
        with suppress(orjson.JSONDecodeError):
            return orjson.loads(answer.content)
        try:
            # Some servers write numbers that JSON does not have: whoever reads them says which.
            return answer.json()
        except ValueError:
            raise GateError(f"{path} was answered with something that is not JSON", where="rollout") from None

    def _check(self, path: str, answer: httpx.Response) -> None:
        told = f"{path} was answered with {answer.status_code}: {answer.text[:SHOWN]}"
        if answer.status_code in (401, 403):
            raise CredentialsError(
                f"{answer.request.url.host}:{answer.request.url.port} refuses this run: {told}",
                where=self._where,
                fix="name the environment variable with its key in apiKeyEnv, or other headers that it asks for",
            )
        if answer.is_redirect:
            raise UnsupportedError(
                f"{path} was redirected to {answer.headers.get('location')}, where no key is sent",
                where=self._where,
                fix="write the address that answers by itself",
            )
        if answer.status_code >= 500:
            raise LostError(told)
        if answer.status_code != 200:
            raise GateError(told, where="rollout")

    async def _send(self, method: str, path: str, **how: Any) -> httpx.Response:
        try:
            return await self._client.request(method, f"{self.url}{path}", headers=dict(self._server.headers), **how)
        except httpx.InvalidURL as error:
            raise LostError(f"{self.url}: {error}") from None
        except httpx.RequestError as error:
            raise LostError(f"{self.url}{path}: {error or type(error).__name__}") from None


async def exposition(wire: Wire) -> str:
    """Metrics in Prometheus' text format, at the path that all servers share. Raises LostError or GateError."""
    return await wire.text("/metrics", METRICS_SECONDS)


def is_serving(url: str, *, seconds: float, headers: Mapping[str, str] | None = None) -> bool:
    """Whether the server there answers in this time that it is up; for who waits for one, outside of an event loop."""
    return not why_not_serving(url, seconds=seconds, headers=headers)


REFUSED = "the connection is refused"


def why_not_serving(url: str, *, seconds: float, headers: Mapping[str, str] | None = None) -> str:
    """`is_serving`, with the reason why it is not, such as `REFUSED`: nothing listens there. Empty if it is."""
    try:
        status = httpx.get(f"{url}/health", timeout=seconds, trust_env=False, headers=headers).status_code
    except httpx.HTTPError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ConnectionRefusedError):
                return REFUSED
            cause = cause.__cause__ or cause.__context__
        return str(error) or type(error).__name__
    return "" if status == 200 else f"/health was answered with {status}"


def requires_token(url: str, *, seconds: float, headers: Mapping[str, str]) -> bool | None:
    """Whether the server was given the token in `headers`: it answers requests with it, and refuses others.

    Another program may listen at a server's address, and answer `/health` as well, but cannot know the token. The token
    is only sent if a request without it is refused. None if the server does not answer now.
    """
    try:
        bare = httpx.get(f"{url}/v1/models", timeout=seconds, trust_env=False).status_code
        if bare != 401:
            return None if bare >= 500 else False
        status = httpx.get(f"{url}/v1/models", timeout=seconds, trust_env=False, headers=headers).status_code
    except httpx.HTTPError:
        return None
    return True if status == 200 else None if status >= 500 else False


async def adapter_names(wire: Wire) -> frozenset[str]:
    """Adapters that the server holds, by the list of models that every kind has from OpenAI."""
    models = (await wire.get("/v1/models"))["data"]
    return frozenset(str(model["id"]) for model in models if model.get("parent"))


def _event(path: str, text: str) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except ValueError:
        # Half a line is the last that came of a connection that was cut.
        raise LostError(f"{path} sent an event that is not JSON: {text[:SHOWN]}") from None
    if not isinstance(event, dict):
        raise GateError(f"{path} sent an event that is no object: {text[:SHOWN]}", where="rollout")
    error = event.get("error")
    if error is None:
        return event
    code = error.get("code") if isinstance(error, dict) else None
    told = f"{path} was answered with an error: {json.dumps(error)[:SHOWN]}"
    if isinstance(code, int) and code >= 500:
        raise LostError(told)
    raise GateError(told, where="rollout")
