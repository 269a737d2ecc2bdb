"""The routes.

Belongs here: HTTP to engine requests, and back. Does not belong here: the form of requests (`requests`) and responses
(`answers`), access control (`guard`).

Written directly for ASGI: a framework would do more work per request and streamed piece than the response itself needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import OrbitError
from orbit_runtime.planner.support.manifests import Kind
from orbit_runtime.ports.guard import APIError, Guard
from orbit_runtime.serve.answers import LAST_EVENT, ResponseForm, SentText, event
from orbit_runtime.serve.channel import Choice
from orbit_runtime.serve.engine_client import EngineClient, ServedRequest
from orbit_runtime.serve.metrics import ServeMetrics
from orbit_runtime.serve.names import NEW_NAME, POLICY, ServedModel, address_fault
from orbit_runtime.serve.requests import (
    ChatBody,
    CompletionBody,
    ReloadBody,
    SamplingBody,
    ServeLimits,
    UpdateBody,
    check_given,
    choice_key,
    from_orbit,
    parse_body,
)

LONG_BODY = 1 << 15
"""Body size in bytes above which prompts are tokenised outside the event loop."""
DEFAULT_TOKENS = 16
"""Default of `/v1/completions`, as at OpenAI; a chat completion may use all remaining tokens."""
MODEL_PREFIX = "/v1/models/"
UPDATE_PATHS = ("/update_weights", "/reload_weights")
JSON = (b"content-type", b"application/json")
PROVENANCE_HEADER = b"orbit-policy"

Route = Callable[[bytes, Receive, Send], Awaitable[None]]


def build_app(
    engine: EngineClient,
    tokenizer: ChatTokenizer,
    vocabulary: int,
    limits: ServeLimits,
    metrics: ServeMetrics,
    token: str | None,
    kind: Kind = "Torch",
    update_token: str | None = None,
) -> ASGIApp:
    """
    Args:
        token: token that clients must send; None for none.
        kind: engine kind, which decides the supported sampling settings.
        update_token: token that alone may change weights; None if `token` may too.
    """
    metrics.watch(lambda: engine.under_way)
    routes = Routes(engine, tokenizer, vocabulary, limits, metrics, kind)
    paths = frozenset(path for path, _ in routes.table)
    return Guard(
        routes,
        token=token,
        path_tokens={} if update_token is None else dict.fromkeys(UPDATE_PATHS, update_token),
        body_bytes=limits.body_bytes,
        read_seconds=limits.read_seconds,
        answered=lambda path, *told: metrics.answered(path if path in paths else "other", *told),
    )


class Routes:
    """One method per route."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: ChatTokenizer,
        vocabulary: int,
        limits: ServeLimits,
        metrics: ServeMetrics,
        kind: Kind,
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._metrics = metrics
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._kind = kind
        self.table: Mapping[tuple[str, str], Route] = {
            ("/v1/models", "GET"): self.models,
            ("/v1/completions", "POST"): self.completions,
            ("/v1/chat/completions", "POST"): self.chat,
            ("/update_weights", "POST"): self.update,
            ("/reload_weights", "POST"): self.reload,
            ("/health", "GET"): self.health,
            ("/metrics", "GET"): self.metrics,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The guard around it passes each body on whole."""
        path, method, body = scope["path"], scope["method"], (await receive())["body"]
        try:
            if (route := self.table.get((path, method))) is not None:
                await route(body, receive, send)
            elif path.startswith(MODEL_PREFIX) and method == "GET":
                await _answer(send, self._find(path.removeprefix(MODEL_PREFIX)).to_json())
            else:
                raise self._no_route(path, method)
        except APIError as error:
            await _say(send, error)
        except OrbitError as error:
            await _say(send, from_orbit(error))
        except RecursionError:
            await _say(send, APIError(400, "the body is nested too deeply"))
        except Exception as error:
            await _say(send, APIError(500, "a bug in Orbit", code=type(error).__name__))
            raise

    def _no_route(self, path: str, method: str) -> APIError:
        if path in {each for each, _ in self.table} or path.startswith(MODEL_PREFIX):
            return APIError(405, f"{path[:200]} takes no {method[:20]}")
        under = ", ".join(each for each, _ in self.table if each.startswith("/v1/"))
        return APIError(404, f"there is no {path[:200]} here; the API is at {under}")

    async def health(self, _body: bytes, _receive: Receive, send: Send) -> None:
        failed = bool(self._engine.failure)
        await _answer(send, {"ok": not failed}, 503 if failed else 200)

    async def metrics(self, _body: bytes, _receive: Receive, send: Send) -> None:
        kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        await _send(send, 200, self._metrics.render(), [kind])

    async def models(self, _body: bytes, _receive: Receive, send: Send) -> None:
        await _answer(send, {"object": "list", "data": [served.to_json() for served in self._engine.all()]})

    async def update(self, body: bytes, _receive: Receive, send: Send) -> None:
        """Responds once the weights are proven and sample. Until then, or if they are refused, the previous ones
        stay."""
        asked = parse_body(UpdateBody, body)
        if (asked.adapter is None) == (asked.checkpoint is None):
            raise APIError(400, "name either an adapter or a checkpoint", param="adapter")
        if asked.checkpoint is not None and asked.model not in (None, self._engine.base):
            message = f"a whole model takes the place of the base, {self._engine.base!r}: leave `model` out"
            raise APIError(400, message, param="model")
        is_whole = asked.checkpoint is not None
        if fault := address_fault(asked.adapter or asked.checkpoint or ""):
            self._metrics.updated("refused")
            raise APIError(422, fault, param="checkpoint" if is_whole else "adapter")
        name = self._engine.base if is_whole else asked.model or self._engine.default_name(POLICY)
        if self._engine.find(name) is None and not NEW_NAME.fullmatch(name):
            message = "a new name has up to 4 parts of up to 64 letters, digits and ` _.:@+-`, such as team/sums:v2"
            raise APIError(400, message, param="model")
        try:
            said = await self._engine.change(name, adapter=asked.adapter, checkpoint=asked.checkpoint)
        except APIError as error:
            if error.status != 403:
                self._metrics.updated("refused")
            raise
        self._metrics.updated("proven")
        await _answer(send, said)

    async def reload(self, body: bytes, _receive: Receive, send: Send) -> None:
        """Puts the base under the name, and the model that the server started with under the base's own name."""
        asked = parse_body(ReloadBody, body)
        name = self._find(asked.model or self._engine.name_to_reload()).name
        said = await self._engine.change(name)
        self._metrics.updated("base")
        await _answer(send, said)

    async def completions(self, body: bytes, receive: Receive, send: Send) -> None:
        asked = parse_body(CompletionBody, body)
        served = self._find(asked.model)
        prompts = asked.prompts()
        if prompts and isinstance(prompts[0], str):
            texts = [str(prompt) for prompt in prompts]
            encoded = await self._encode(
                lambda: [self._tokenizer.encode_raw(text) for text in texts], len(body), "prompt"
            )
        else:
            encoded = [list(map(int, prompt)) for prompt in prompts]
        form = self._form(served, asked, ())
        choices = self._choices(asked, encoded, asked.max_tokens or DEFAULT_TOKENS)
        await self._answer(asked, form, choices, sum(map(len, encoded)), receive, send)

    async def chat(self, body: bytes, receive: Receive, send: Send) -> None:
        asked = parse_body(ChatBody, body)
        served = self._find(asked.model)
        tools, schemas = asked.offered, asked.tool_schemas()
        messages = asked.conversation(writes_calls=self._tokenizer.writes_calls)
        try:
            param = "reasoning_effort" if asked.reasoning_effort else "chat_template_kwargs"
            tokenizer = self._tokenizer.given(asked.template_arguments, param)
        except OrbitError as error:
            raise APIError(400, str(error), param=param) from None
        ids = await self._encode(lambda: [tokenizer.encode_chat(messages, tools=tools)], len(body), "messages")
        form = self._form(served, asked, schemas)
        choices = self._choices(asked, ids, asked.max_completion_tokens or asked.max_tokens)
        await self._answer(asked, form, choices, len(ids[0]), receive, send)

    def _form(self, served: ServedModel, asked: SamplingBody, tools: Collection[str]) -> ResponseForm:
        return ResponseForm(
            isinstance(asked, ChatBody),
            served.name,
            self._tokenizer,
            served.fingerprint,
            asked.asks_logprobs,
            tools,
            asked.stops,
            asked.alternatives,
            provenance=served.provenance,
        )

    def _find(self, name: str) -> ServedModel:
        served = self._engine.find(name)
        if served is None:
            names = ", ".join(each.name for each in self._engine.all())
            raise APIError(
                404, f"there is no model {name[:200]!r}; there are: {names}", param="model", code="model_not_found"
            )
        return served

    async def _encode(self, encode: Callable[[], list[list[int]]], size: int, param: str) -> list[list[int]]:
        try:
            return encode() if size < LONG_BODY else await asyncio.to_thread(encode)
        except OrbitError as error:
            raise APIError(400, str(error), param=param) from None

    async def _answer(
        self,
        asked: SamplingBody,
        form: ResponseForm,
        choices: Sequence[Choice],
        prompt_tokens: int,
        receive: Receive,
        send: Send,
    ) -> None:
        job = self._engine.submit(form.model, choices, is_streamed=bool(asked.stream))
        self._metrics.asked(form.model, prompt_tokens)
        watcher = asyncio.create_task(_abort_when_gone(receive, job))
        try:
            if asked.stream:
                await _stream(send, job, form, prompt_tokens, with_usage=asked.with_usage)
                return
            done = await job.results()
            if any(part.finish_reason == "abort" for part in done):
                raise APIError(503, "the server is stopping", code="stopping")
            headers = [JSON, (PROVENANCE_HEADER, form.provenance)]
            await _send(send, 200, orjson.dumps(form.whole(done, prompt_tokens)), headers)
        finally:
            watcher.cancel()
            job.abort()

    def _choices(self, asked: SamplingBody, prompts: Sequence[list[int]], tokens: int | None) -> list[Choice]:
        limits = self._limits
        count = len(prompts) * asked.n
        if not 0 < count <= limits.choices:
            raise APIError(400, f"{count} completions were requested, and 1 to {limits.choices} are allowed", param="n")
        longest = max(map(len, prompts))
        if min(map(len, prompts)) == 0:
            raise APIError(400, "a prompt is empty", param="prompt")
        if min(map(min, prompts)) < 0 or max(map(max, prompts)) >= self._vocabulary:
            raise APIError(400, f"token ids are from 0 to {self._vocabulary - 1}", param="prompt")
        left = limits.sequence - longest
        wanted = min(limits.max_tokens, left) if tokens is None else tokens
        if wanted > left or wanted < 1:
            raise APIError(
                400,
                f"a prompt of {longest} tokens and {max(wanted, 1)} new ones are more than {limits.sequence}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if wanted > limits.max_tokens:
            raise APIError(
                400, f"`max_tokens` is {wanted}, and at most {limits.max_tokens} is allowed", param="max_tokens"
            )
        sampling = asked.sampling(wanted)
        check_given(self._kind, sampling, asked)
        known = {"stop_token_ids": sampling.stop_token_ids, "logit_bias": [token for token, _ in sampling.logit_bias]}
        for param, tokens_of in known.items():
            if not all(0 <= token < self._vocabulary for token in tokens_of):
                raise APIError(400, f"token ids are from 0 to {self._vocabulary - 1}", param=param)
        return [
            Choice(tuple(prompt), choice_key(asked.seed, at, sample), sampling, asked.alternatives)
            for at, prompt in enumerate(prompts)
            for sample in range(asked.n)
        ]


async def _stream(send: Send, job: ServedRequest, form: ResponseForm, prompt_tokens: int, *, with_usage: bool) -> None:
    kind = (b"content-type", b"text/event-stream; charset=utf-8")
    headers = [kind, (b"cache-control", b"no-cache"), (PROVENANCE_HEADER, form.provenance)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    sent = [SentText(form.held_back) for _ in job.parts]
    starts = [form.start(part.index) for part in job.parts]
    await _send_more(send, b"".join(event(first) for first in starts if first is not None))
    try:
        async for part in job.take():
            await _send_more(send, b"".join(map(event, form.piece(part, sent[part.index]))))
        usage = event(form.end(prompt_tokens, job.parts)) if with_usage else b""
        last = usage + LAST_EVENT
    except APIError as error:
        # The status is sent already.
        last = event(error.to_json())
    await send({"type": "http.response.body", "body": last})


async def _send_more(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _say(send: Send, error: APIError) -> None:
    more = [(b"retry-after", b"1")] if error.status == 429 else []
    await _send(send, error.status, orjson.dumps(error.to_json()), [JSON, *more])


async def _answer(send: Send, said: Any, status: int = 200) -> None:
    await _send(send, status, orjson.dumps(said), [JSON])


async def _send(send: Send, status: int, data: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    length = (b"content-length", str(len(data)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": data})


async def _abort_when_gone(receive: Receive, job: ServedRequest) -> None:
    with suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
        job.abort()
