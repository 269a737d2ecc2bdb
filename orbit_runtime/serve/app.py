"""The routes.

Belongs here: HTTP → what is asked of sampler and policies, and back. Does not belong here: the form of bodies
(`requests`) and answers (`answers`), who may ask (`guard`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from orbit_runtime.errors import OrbitError, UsageError
from orbit_runtime.serve.answers import LAST_EVENT, Form, Sent, event
from orbit_runtime.serve.errors import APIError, from_orbit
from orbit_runtime.serve.guard import Guard
from orbit_runtime.serve.metrics import ServeMetrics
from orbit_runtime.serve.policies import Policies, Served
from orbit_runtime.serve.requests import (
    ChatBody,
    CompletionBody,
    Limits,
    ReloadBody,
    SamplingBody,
    UpdateBody,
    choice_key,
    parse_body,
)
from orbit_runtime.serve.sampler import Choice, Job, Sampler
from orbit_runtime.types import Completion

LONG_BODY = 1 << 15
"""Bytes from which on a prompt is tokenized beside the event loop."""
DEFAULT_TOKENS = 16
"""Of `/v1/completions`, as OpenAI has it; a chat's answer may take what is left."""


def build_app(
    policies: Policies, sampler: Sampler, limits: Limits, metrics: ServeMetrics, token: str | None
) -> ASGIApp:
    """Args: token: what clients must bring; None: nothing."""
    metrics.watch(lambda: sampler.under_way)
    routes = Routes(policies, sampler, limits, metrics)
    app = FastAPI(title="orbit serve", docs_url=None, redoc_url=None, openapi_url=None)
    table = (
        ("GET", "/v1/models", routes.models),
        ("GET", "/v1/models/{name:path}", routes.model),
        ("POST", "/v1/completions", routes.completions),
        ("POST", "/v1/chat/completions", routes.chat),
        ("POST", "/update_weights", routes.update),
        ("POST", "/reload_weights", routes.reload),
        ("GET", "/health", routes.health),
        ("GET", "/metrics", routes.metrics),
    )
    for method, path, route in table:
        app.add_api_route(path, route, methods=[method], response_model=None)
    app.add_exception_handler(APIError, _said)
    app.add_exception_handler(OrbitError, _said)
    app.add_exception_handler(HTTPException, _said)
    app.add_exception_handler(Exception, _said)
    return Guard(
        app,
        metrics,
        token=token,
        body_bytes=limits.body_bytes,
        read_seconds=limits.read_seconds,
        routes=[path for _, path, _ in table],
    )


async def _said(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        error = APIError(error.status_code, str(error.detail))
    elif isinstance(error, OrbitError):
        error = from_orbit(error)
    said = error if isinstance(error, APIError) else APIError(500, "a bug in Orbit", code=type(error).__name__)
    headers = {"retry-after": "1"} if said.status == 429 else None
    return JSONResponse(said.to_json(), status_code=said.status, headers=headers)


class Routes:
    """One method a route."""

    def __init__(self, policies: Policies, sampler: Sampler, limits: Limits, metrics: ServeMetrics) -> None:
        self._policies = policies
        self._sampler = sampler
        self._limits = limits
        self._metrics = metrics
        self._tokenizer = policies.base.tokenizer
        self._vocabulary = policies.base.policy.vocabulary

    async def health(self) -> JSONResponse:
        failed = self._sampler.failure is not None
        return JSONResponse({"ok": not failed}, status_code=503 if failed else 200)

    async def metrics(self) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [served.to_json() for served in self._policies.all()]})

    async def model(self, name: str) -> JSONResponse:
        return JSONResponse(self._find(name).to_json())

    async def update(self, request: Request) -> JSONResponse:
        """Answers once the adapter samples, proven; until then, and where it is refused, the one before does."""
        asked = parse_body(UpdateBody, await request.body())
        name = asked.model or self._policies.default_name()
        try:
            self._policies.check_source(asked.adapter)
        except UsageError as error:
            raise APIError(403, str(error), param="adapter") from None
        try:
            served, proof = await asyncio.to_thread(self._policies.load, name, asked.adapter)
        except OrbitError:
            self._metrics.updated("refused")
            raise
        self._metrics.updated("proven")
        return JSONResponse({**served.to_json(), "proof": proof.to_json()})

    async def reload(self, request: Request) -> JSONResponse:
        """The name answers as the base does."""
        asked = parse_body(ReloadBody, await request.body())
        name = self._find(asked.model or self._policies.default_name()).name
        served = await asyncio.to_thread(self._policies.reset, name)
        self._metrics.updated("base")
        return JSONResponse(served.to_json())

    async def completions(self, request: Request) -> Response:
        asked = parse_body(CompletionBody, body := await request.body())
        served = self._find(asked.model)
        prompts = asked.prompts()
        if prompts and isinstance(prompts[0], str):
            texts = [str(prompt) for prompt in prompts]
            encoded = await self._encode(lambda: [self._tokenizer.encode_text(text) for text in texts], len(body))
        else:
            encoded = [list(map(int, prompt)) for prompt in prompts]
        form = Form(False, served.name, self._tokenizer, served.fingerprint, asked.asks_logprobs, (), asked.stops)
        return await self._answer(request, asked, form, encoded, asked.max_tokens or DEFAULT_TOKENS)

    async def chat(self, request: Request) -> Response:
        asked = parse_body(ChatBody, body := await request.body())
        served = self._find(asked.model)
        messages, tools, names = asked.conversation(), asked.tools or [], asked.tool_names()
        try:
            ids = await self._encode(lambda: [self._tokenizer.encode_chat(messages, tools=tools)], len(body))
        except OrbitError as error:
            raise APIError(400, str(error), param="messages") from None
        form = Form(True, served.name, self._tokenizer, served.fingerprint, asked.asks_logprobs, names, asked.stops)
        return await self._answer(request, asked, form, ids, asked.max_completion_tokens or asked.max_tokens)

    def _find(self, name: str) -> Served:
        served = self._policies.find(name)
        if served is None:
            names = ", ".join(each.name for each in self._policies.all())
            raise APIError(
                404, f"there is no model {name[:200]!r}; there are: {names}", param="model", code="model_not_found"
            )
        return served

    async def _encode(self, encode: Any, size: int) -> list[list[int]]:
        found: list[list[int]] = encode() if size < LONG_BODY else await asyncio.to_thread(encode)
        return found

    async def _answer(
        self, request: Request, asked: SamplingBody, form: Form, prompts: Sequence[list[int]], tokens: int | None
    ) -> Response:
        choices = self._choices(asked, prompts, tokens)
        prompt_tokens = sum(map(len, prompts))
        self._metrics.asked(form.model, prompt_tokens)
        job = self._sampler.submit(form.model, choices, is_streamed=bool(asked.stream))
        if asked.stream:
            pieces = self._stream(request, job, form, prompt_tokens, with_usage=asked.with_usage)
            return StreamingResponse(pieces, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        watcher = asyncio.create_task(_abort_when_gone(request, job))
        try:
            done = await job.results()
        finally:
            watcher.cancel()
            job.abort()
            self._policies.sweep()
        if any(completion.finish_reason == "abort" for completion in done):
            raise APIError(503, "the server is stopping", code="stopping")
        return JSONResponse(form.whole(done, prompt_tokens))

    async def _stream(
        self, request: Request, job: Job, form: Form, prompt_tokens: int, *, with_usage: bool
    ) -> AsyncIterator[bytes]:
        sent = [Sent(form.held_back) for _ in job.request_ids]
        done: list[Completion] = []
        watcher = asyncio.create_task(_abort_when_gone(request, job))
        try:
            for index in range(len(sent)):
                if (first := form.start(index)) is not None:
                    yield event(first)
            async for each in job.take():
                for piece in form.piece(each.index, each.completion, sent[each.index], is_done=each.is_done):
                    yield event(piece)
                if each.is_done:
                    done.append(each.completion)
            if with_usage:
                yield event(form.end(prompt_tokens, done))
            yield LAST_EVENT
        except OrbitError as error:
            # The status is sent already.
            yield event(from_orbit(error).to_json())
        except APIError as error:
            yield event(error.to_json())
        finally:
            watcher.cancel()
            job.abort()
            self._policies.sweep()

    def _choices(self, asked: SamplingBody, prompts: Sequence[list[int]], tokens: int | None) -> list[Choice]:
        limits = self._limits
        count = len(prompts) * asked.n
        if not 0 < count <= limits.choices:
            raise APIError(400, f"{count} completions are asked for, and 1 to {limits.choices} may be", param="n")
        longest = max(map(len, prompts))
        if min(map(len, prompts)) == 0:
            raise APIError(400, "a prompt is empty", param="prompt")
        if not all(0 <= token < self._vocabulary for prompt in prompts for token in prompt):
            raise APIError(400, f"tokens are from 0 to {self._vocabulary - 1}", param="prompt")
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
            raise APIError(400, f"`max_tokens` is {wanted}, and {limits.max_tokens} may be", param="max_tokens")
        sampling = asked.sampling(wanted)
        known = (*sampling.stop_token_ids, *(token for token, _ in sampling.logit_bias))
        if not all(0 <= token < self._vocabulary for token in known):
            raise APIError(400, f"tokens are from 0 to {self._vocabulary - 1}", param="logit_bias")
        return [
            Choice(tuple(prompt), choice_key(asked.seed, at, sample), sampling)
            for at, prompt in enumerate(prompts)
            for sample in range(asked.n)
        ]


async def _abort_when_gone(request: Request, job: Job) -> None:
    """The body was read: all that a client can still say is that it has left."""
    with suppress(asyncio.CancelledError):
        while (await request.receive())["type"] != "http.disconnect":
            pass
        job.is_gone = True
        job.abort()
