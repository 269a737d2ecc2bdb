"""A model behind an OpenAI-compatible API, with the interface that the environments of a run expect.

Belongs here: chat messages in place of tokens, requests, retries. Does not belong here: the prompts (`environments`),
concurrency (`player`).

Environments use tokens and an API uses messages, so here one token stands for a whole conversation, or for an answer of
the model. An answer counts as many tokens as the API reports, so that limits in tokens hold.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from itertools import count
from typing import Any
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx
import orjson
from yarl import URL

from orbit_runtime.errors import CredentialsError, UnsupportedError, UsageError
from orbit_runtime.evaluation.player import UnansweredSample
from orbit_runtime.evaluation.records import FailureKind, Usage
from orbit_runtime.planner.support.manifests import IS_SET
from orbit_runtime.types import FLOATS, TOKENS, Completion, FinishReason, Sampling

BUSY = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""Status codes for which a retry may succeed."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0
CONNECT_SECONDS = 10.0
MAX_ANSWER = 1 << 26
"""Most bytes of an answer: far above the longest, and small enough for all requests in flight."""
GIVEN = ("temperature", "topP", "stop")
"""Sampling settings, besides `maxNewTokens`, that every such API accepts."""


@dataclass(frozen=True, slots=True)
class ApiModel:
    """The address of an API, and how patiently to ask."""

    url: str
    """Example: `http://127.0.0.1:8000/v1`."""
    model: str
    key: str | None = None
    retries: int = 5
    timeout_seconds: float = 600.0
    """Time limit of one answer."""

    @property
    def shown(self) -> str:
        """The address without any user name and password."""
        return str(URL(self.url).with_user(None))

    def redacted(self, text: str) -> str:
        """A server's message without the API key, which some servers repeat."""
        return text.replace(self.key, "***") if self.key else text


def check_api_sampling(sampling: Sampling) -> None:
    """Raises UnsupportedError (78) for settings that an OpenAI-compatible API need not accept."""
    refused = [name for name, is_set in IS_SET.items() if is_set(sampling) and name not in GIVEN]
    if refused:
        raise UnsupportedError(
            f"an OpenAI-compatible API does not support {', '.join(refused)}",
            where=f"spec.rollout.sampling.{refused[0]}",
            fix=f"leave it out for this evaluation: --set spec.rollout.sampling.{refused[0]}=null",
        )


class Conversations:
    """A `Tokenizer` whose tokens stand for conversations and answers. Belongs to one event loop."""

    eos_ids: tuple[int, ...] = ()
    marker_ids: tuple[int, ...] = ()
    call_format = ""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._asked: dict[int, tuple[list[Mapping[str, Any]], Sequence[Mapping[str, Any]]]] = {}
        self._answers: dict[int, tuple[int, Mapping[str, Any]]] = {}

    def encode_many(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[list[int]]:
        return [[self._add([dict(each) for each in messages], tools)] for messages in conversations]

    def encode_continuation(
        self,
        messages: Sequence[Mapping[str, Any]],
        answered: int,
        last_id: int | None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        assert last_id is not None
        before, answer = self._answers[last_id]
        following = _with_call_ids(messages[answered + 1 :], answer)
        return [self._add([*self._asked[before][0], answer, *following], tools)]

    def decode(self, token_ids: Sequence[int]) -> str:
        raise AssertionError("the text of an API's answer is told, not decoded")

    def read(self, prompt_ids_T: Sequence[int]) -> tuple[list[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """Messages and tools of the conversation that the last of these tokens represents."""
        return self._asked[prompt_ids_T[-1]]

    def answer(self, prompt_ids_T: Sequence[int], message: Mapping[str, Any]) -> int:
        """The token that represents this answer."""
        number = next(self._numbers)
        self._answers[number] = (prompt_ids_T[-1], message)
        return number

    def _add(self, messages: list[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> int:
        number = next(self._numbers)
        self._asked[number] = (messages, tools)
        return number


def _with_call_ids(messages: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Adds to each tool's answer the id of its call; answers are in the order of the calls."""
    calls = iter(answer.get("tool_calls") or ())
    named: list[Mapping[str, Any]] = []
    for message in messages:
        call = next(calls, None) if message.get("role") == "tool" else None
        named.append({**message, "tool_call_id": call["id"]} if call else dict(message))
    return named


class _TryAgain(Exception):
    def __init__(self, kind: FailureKind, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.kind, self.reason, self.wait = kind, reason, wait
        """`wait`: seconds that the server requests; None to double the wait each time."""


class ApiConnection:
    """A connection pool for one API and one event loop, without a limit on requests in flight.

    It uses aiohttp, not httpx as elsewhere: at each turn, httpcore's pool scans all its connections and waiting
    requests, which with 64 in flight costs several times as much as a request.
    """

    def __init__(self, api: ApiModel) -> None:
        """Raises UsageError if the environment sets a proxy with a protocol other than HTTP."""
        url = URL(f"{api.url.rstrip('/')}/chat/completions")
        headers = {"Content-Type": "application/json"}
        if api.key:
            headers["Authorization"] = f"Bearer {api.key}"
            # A user name and password in the address would be a second authorisation.
            url = url.with_user(None)
        self._url = url
        self._headers = headers
        self.left_out: set[str] = set()
        """Settings that the API refuses, each of which had the API's own default."""
        self._session = aiohttp.ClientSession(
            # The same certificates as for Orbit's other requests; the player limits how many are in flight.
            connector=aiohttp.TCPConnector(limit=0, ssl=httpx.create_ssl_context() if url.scheme == "https" else True),
            timeout=aiohttp.ClientTimeout(total=api.timeout_seconds, connect=CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            # Looked up once: `trust_env` does so in a thread at every request, and sends credentials from ~/.netrc.
            proxy=_proxy_of(url),
        )

    async def post(self, content: bytes) -> ApiResponse:
        """
        Raises:
            _TryAgain: there was no answer, or only part of one.
        """
        try:
            # Do not follow redirects: the user should see that the address changed, and the key must not go elsewhere.
            async with self._session.post(
                self._url, data=content, headers=self._headers, allow_redirects=False
            ) as answer:
                return ApiResponse(answer.status, await _read(answer.content), answer.headers.get("Retry-After"))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _TryAgain("Unreachable", str(error) or type(error).__name__) from None
        except TimeoutError as error:
            raise _TryAgain("Timeout", f"no answer in time ({type(error).__name__})") from None
        except aiohttp.ClientError as error:
            raise _TryAgain("CutStream", f"the answer was cut off: {error or type(error).__name__}") from None

    async def close(self) -> None:
        await self._session.close()


async def _read(content: aiohttp.StreamReader) -> bytes:
    pieces, size = [], 0
    while piece := await content.readany():
        pieces.append(piece)
        size += len(piece)
        if size > MAX_ANSWER:
            raise _TryAgain("BadAnswer", f"an answer of more than {MAX_ANSWER} bytes")
    return b"".join(pieces)


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """Reads the whole body."""

    status: int
    body: bytes
    retry_after: str | None = None

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


def _proxy_of(url: URL) -> str | None:
    """The proxy from the usual environment variables."""
    if url.host is None or proxy_bypass(url.host):
        return None
    known = getproxies()
    proxy = known.get(url.scheme) or known.get("all")
    if proxy and URL(proxy).scheme not in ("http", "https"):
        raise UsageError(
            f"a proxy of the protocol {URL(proxy).scheme!r} is not supported",
            where=f"{url.scheme}_proxy",
            fix="name an HTTP proxy in that environment variable, or the API's host in no_proxy",
        )
    return proxy


@dataclass
class ApiEpisode:
    """The requests of one episode to the API, and their usage."""

    connection: ApiConnection
    api: ApiModel
    conversations: Conversations
    sleep: Callable[[float], Any]
    _usage: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Usage.__dataclass_fields__, 0))

    @property
    def usage(self) -> Usage:
        return Usage(**self._usage)

    async def sample(self, prompt_ids_T: Sequence[int], sampling: Sampling, *, key: int) -> Completion:
        """Raises Unanswered after the last try; CredentialsError and UsageError if no retry would help."""
        messages, tools = self.conversations.read(prompt_ids_T)
        body = build_request(self.api.model, messages, tools, sampling, key)
        for tries in count(1):
            self._usage["requests"] += 1
            self._usage["retries"] += tries > 1
            try:
                answer = await self._ask(body)
                break
            except _TryAgain as error:
                if tries > self.api.retries:
                    raise UnansweredSample(error.kind, error.reason) from None
                wait = FIRST_WAIT * 2.0 ** (tries - 1) if error.wait is None else error.wait
            # A factor from 1 to 1.5 of its own: requests refused together do not return together.
            await self.sleep(min(LONGEST_WAIT, wait * (1 + key % 1024 / 2048)))
        return self._completion(prompt_ids_T, answer)

    async def _ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        sent = {name: value for name, value in body.items() if name not in self.connection.left_out}
        answer = await self.connection.post(orjson.dumps(sent))
        if answer.status == 200:
            return _parse(answer, self.api)
        # Models that reason refuse these settings at any value.
        refused = {name for name in ("temperature", "top_p") if sent.get(name) == 1.0 and name in answer.text}
        if answer.status == 400 and refused:
            self.connection.left_out |= refused
            return await self._ask(body)
        raise _explain(answer, self.api)

    def _completion(self, prompt_ids_T: Sequence[int], answer: Mapping[str, Any]) -> Completion:
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        message = choice["message"]
        self._usage["prompt_tokens"] += int(usage.get("prompt_tokens") or 0)
        counted = int(usage.get("completion_tokens") or 0)
        self._usage["completion_tokens"] += counted
        calls = message.get("tool_calls") or ()
        told = {"role": "assistant", "content": message.get("content") or ""}
        number = self.conversations.answer(prompt_ids_T, {**told, "tool_calls": calls} if calls else told)
        length = max(1, counted)
        reason: FinishReason = "length" if choice.get("finish_reason") == "length" else "stop"
        text = "\n".join([*([told["content"]] if told["content"] or not calls else []), *map(_call_text, calls)])
        return Completion(
            0,
            array(TOKENS, (number,)) * length,
            array(FLOATS, (0.0,)) * length,
            array(TOKENS, (-1,)) * length,
            reason,
            text,
        )


def build_request(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    sampling: Sampling,
    key: int,
) -> dict[str, Any]:
    """The body of a chat completion. What is left out of it, a server takes from the model's generation_config.json."""
    body: dict[str, Any] = {
        "model": model, "messages": list(messages), "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature, "top_p": sampling.top_p,
    }  # fmt: skip
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if tools:
        body["tools"] = list(tools)
    # Servers that honour the seed give the same sample for the same seed, and others for other seeds.
    body["seed"] = key & 0x7FFFFFFF
    return body


def _call_text(call: Mapping[str, Any]) -> str:
    """A tool call as text, as written by models without a field for calls: this is what environments read."""
    function = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    # The environment reports arguments that are not JSON.
    with suppress(ValueError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return f"<tool_call>{json.dumps({'name': function.get('name'), 'arguments': arguments})}</tool_call>"


def _parse(response: ApiResponse, api: ApiModel) -> dict[str, Any]:
    try:
        answer = orjson.loads(response.body)
        choice = answer["choices"][0]
        message = choice["message"]
        content, calls = message.get("content"), message.get("tool_calls") or ()
        usage = answer.get("usage") or {}
        is_right = isinstance(content, str | None) and all(isinstance(each, dict) and each.get("id") for each in calls)
        int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        is_right = False
    if not is_right:
        raise _TryAgain("BadAnswer", f"no chat completion: {api.redacted(response.text)[:200]!r}")
    if choice.get("finish_reason") == "content_filter":
        raise UnansweredSample("Refused", "the API's content filter ended the answer")
    return dict(answer)


def _explain(response: ApiResponse, api: ApiModel) -> Exception:
    """The meaning of an answer that is not a completion."""
    status, said = response.status, api.redacted(response.text)[:300].strip()
    if status in (401, 403):
        return CredentialsError(
            f"{api.shown} refuses the key ({status}): {said}",
            where="--api-key-env",
            fix="name the environment variable that holds a valid key for this API",
        )
    if status == 404:
        return UsageError(
            f"{api.shown} does not offer the model {api.model!r}, or chat completions ({status}): {said}",
            where="--base-url, --model",
            fix=f"correct one of them; {api.shown.rstrip('/')}/models lists its models",
        )
    if status in BUSY:
        kind: FailureKind = "RateLimited" if status == 429 else "ServerError"
        return _TryAgain(kind, f"{status}: {said}", retry_after(response.retry_after))
    return UnansweredSample("Refused", f"{status}: {said}")


def retry_after(header: str | None, now: Callable[[], float] = time.time) -> float | None:
    """Seconds that the server asks to wait: a number or a date (RFC 9110, 10.2.3). None if it does not."""
    if not header:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - now())
    except ValueError:
        return None
