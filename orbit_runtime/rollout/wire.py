"""HTTP to one server: JSON in, JSON out, and what may go wrong on the way told apart.

Belongs here: connections, which failures mean that the server is lost, and the questions that every kind of server
answers alike. Does not belong here: what only one kind is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from orbit_runtime.errors import CredentialsError, GateError, UnsupportedError
from orbit_runtime.rollout.served import LostError, Server

REQUEST_SECONDS = 3600.0
"""Longest that one request may take. A server that hangs is noticed long before, by asking for its progress."""
ASK_SECONDS = 60.0
METRICS_SECONDS = 2.0
"""A scrape waits for it, and Prometheus gives up after ten by default."""
SHOWN = 500


def build_client() -> httpx.AsyncClient:
    """One for all servers of a run; proxies of the environment are for other things."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    return httpx.AsyncClient(timeout=httpx.Timeout(REQUEST_SECONDS, connect=10.0), limits=limits, trust_env=False)


class Wire:
    """To one server, wherever it is now: a restarted one has another port."""

    def __init__(self, client: httpx.AsyncClient, server: Server) -> None:
        self._client = client
        self._server = server

    @property
    def url(self) -> str:
        return self._server.url

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Raises LostError, or GateError for a request that the server refuses."""
        return _read(path, await self._send("POST", path, json=body))

    async def act(self, path: str, body: Mapping[str, Any]) -> None:
        """`post` where the answer is only that it was done."""
        _check(path, await self._send("POST", path, json=body))

    async def get(self, path: str) -> Any:
        return _read(path, await self._send("GET", path, timeout=ASK_SECONDS))

    async def text(self, path: str, seconds: float) -> str:
        """Raises LostError, or GateError where it is refused."""
        answer = await self._send("GET", path, timeout=seconds)
        _check(path, answer)
        return answer.text

    async def answers(self, path: str, seconds: float) -> bool:
        """With 200, in this time."""
        try:
            return (await self._send("GET", path, timeout=seconds)).status_code == 200
        except LostError:
            return False

    async def _send(self, method: str, path: str, **how: Any) -> httpx.Response:
        try:
            return await self._client.request(method, f"{self.url}{path}", headers=dict(self._server.headers), **how)
        except httpx.InvalidURL as error:
            raise LostError(f"{self.url}: {error}") from None
        except httpx.RequestError as error:
            raise LostError(f"{self.url}{path}: {error or type(error).__name__}") from None


async def exposition(wire: Wire) -> str:
    """Metrics in Prometheus' text format, where every kind tells them. Raises LostError or GateError."""
    return await wire.text("/metrics", METRICS_SECONDS)


def is_serving(url: str, *, seconds: float, headers: Mapping[str, str] | None = None) -> bool:
    """Whether the server there answers in this time that it is up; for who waits for one, outside of an event loop."""
    try:
        return httpx.get(f"{url}/health", timeout=seconds, trust_env=False, headers=headers).status_code == 200
    except httpx.HTTPError:
        return False


async def adapter_names(wire: Wire) -> frozenset[str]:
    """Adapters that the server holds, by the list of models that every kind has from OpenAI."""
    models = (await wire.get("/v1/models"))["data"]
    return frozenset(str(model["id"]) for model in models if model.get("parent"))


def _check(path: str, answer: httpx.Response) -> None:
    told = f"{path} was answered with {answer.status_code}: {answer.text[:SHOWN]}"
    if answer.status_code in (401, 403):
        raise CredentialsError(
            f"{answer.request.url.host}:{answer.request.url.port} refuses this run: {told}",
            where="spec.rollout.endpoints",
            fix="name the environment variable with its key in apiKeyEnv, or other headers that it asks for",
        )
    if answer.is_redirect:
        raise UnsupportedError(
            f"{path} was redirected to {answer.headers.get('location')}, where no key is sent",
            where="spec.rollout.endpoints",
            fix="write the address that answers by itself",
        )
    if answer.status_code >= 500:
        raise LostError(told)
    if answer.status_code != 200:
        raise GateError(told, where="rollout")


def _read(path: str, answer: httpx.Response) -> Any:
    _check(path, answer)
    try:
        return answer.json()
    except ValueError:
        raise GateError(f"{path} was answered with something that is not JSON", where="rollout") from None
