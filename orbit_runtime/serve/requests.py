"""Client requests: the OpenAI fields that Orbit supports, checked, and what they mean for the engine.

Belongs here: bodies to `Sampling` and stream keys. Does not belong here: a prompt's tokens (`app`).

A field that would change what is sampled, but that the engine does not support, is refused, never ignored.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orbit_runtime.data.chat import joined_parts, plain_message
from orbit_runtime.errors import DataError, GateError, ModelError, OrbitError, OutputError, UnsupportedError, UsageError
from orbit_runtime.model_info.calls import hermes
from orbit_runtime.planner.support.manifests import Kind, check_sampling
from orbit_runtime.ports.guard import APIError
from orbit_runtime.seeds import stream_key
from orbit_runtime.types import Sampling

UNREAD = frozenset({"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
                    "parallel_tool_calls"})  # fmt: skip
"""Fields that do not affect sampling."""
ONLY: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "response_format": (None, {"type": "text"}),
}
"""Fields of which only the value that matches the server's behaviour is accepted."""

MOST_ALTERNATIVES = 20
"""The same limit as in OpenAI's chat API."""
LEAST_TEMPERATURE = 1e-3
"""Logits divided by less overflow fp32."""


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """Limits of requests and of the server. Example: `ServeLimits(sequence=2048)`"""

    body_bytes: int = 1 << 20
    sequence: int = 4096
    """Maximum tokens of a prompt and its completion together."""
    max_tokens: int = 4096
    """Maximum tokens of one completion."""
    choices: int = 128
    """Maximum choices of one request: prompts times `n`."""
    concurrent: int = 512
    """Maximum completions in flight or waiting, over all requests."""
    running: int = 64
    """Maximum completions sampled at a time."""
    seconds: float = 600.0
    """Time limit for one completion, which then ends as it is, as `length`."""
    read_seconds: float = 30.0
    """Time limit for receiving a request's body."""
    models: int = 64
    """Maximum names that are served, unless more are served from the start."""
    drain_seconds: float = 30.0
    """Time limit for requests in flight once the server is asked to stop."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class _StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingBody(_Body):
    """Fields that both kinds of completion share."""

    model: str
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    ignore_eos: bool = False

    @property
    def asks_logprobs(self) -> bool:
        raise NotImplementedError

    @property
    def alternatives(self) -> int:
        """Most probable tokens to report for each position."""
        raise NotImplementedError

    @property
    def with_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, max_new_tokens: int) -> Sampling:
        if len(self.stops) > 16 or not all(self.stops):
            raise APIError(400, "`stop` must be up to 16 non-empty texts", param="stop")
        if self.temperature is not None and 0 < self.temperature < LEAST_TEMPERATURE:
            message = f"`temperature` must be 0, for the most likely token, or at least {LEAST_TEMPERATURE:g}"
            raise APIError(400, message, param="temperature")
        try:
            bias = tuple((int(token), value) for token, value in (self.logit_bias or {}).items())
        except ValueError:
            raise APIError(400, "keys of `logit_bias` are token ids", param="logit_bias") from None
        if len({token for token, _ in bias}) < len(bias):
            raise APIError(400, "`logit_bias` names a token twice", param="logit_bias")
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            max_new_tokens=max_new_tokens,
            stop=self.stops,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            logit_bias=bias,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


class CompletionBody(SamplingBody):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    """Report log-probs of the sampled tokens, and of this many most probable ones."""

    @property
    def asks_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def alternatives(self) -> int:
        return self.logprobs or 0

    def prompts(self) -> list[str] | list[list[int]]:
        """One or several prompts, as text or as tokens."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class ChatBody(SamplingBody):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    """`none`: as if there were no tools."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template, in addition to those of the run."""
    reasoning_effort: str | None = None
    """The template's argument of this name."""

    @property
    def asks_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def alternatives(self) -> int:
        if self.top_logprobs and not self.logprobs:
            raise APIError(400, "`top_logprobs` needs `logprobs: true`", param="top_logprobs")
        return self.top_logprobs or 0

    def conversation(self, *, writes_calls: bool) -> list[dict[str, Any]]:
        """The messages in the form that chat templates take. Args: writes_calls: whether the template writes
        `tool_calls`; if not, they become text."""
        messages = [_message(index, message) for index, message in enumerate(self.messages)]
        return messages if writes_calls else [_with_written_calls(message) for message in messages]

    @property
    def template_arguments(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | self.chat_template_kwargs

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that may be called."""
        return [] if self.tool_choice == "none" else self.tools or []

    def tool_schemas(self) -> dict[str, Mapping[str, Any]]:
        """Name of each tool that may be called → schema of its parameters."""
        functions = [tool.get("function") for tool in self.offered]
        named: dict[str, Mapping[str, Any]] = {}
        for each in functions:
            name = each.get("name") if isinstance(each, dict) else None
            if not isinstance(each, dict) or not isinstance(name, str) or not name:
                raise APIError(400, "each tool must be a function with a name", param="tools")
            parameters = each.get("parameters")
            named[name] = parameters if isinstance(parameters, dict) else {}
        return named


class UpdateBody(_Body):
    """One of the two."""

    adapter: str | None = None
    """Folder of an adapter, or of a run: alone its best adapter, or else its newest, or with `@newest`, `@step-12`."""
    checkpoint: str | None = None
    """Folder of a whole model, which takes the base's place."""
    model: str | None = None


class ReloadBody(_Body):
    model: str | None = None


def parse_body[Body: _Body](kind: type[Body], data: bytes) -> Body:
    """Raises APIError (400) naming the first invalid field."""
    try:
        fields = json.loads(data.decode() or "{}", parse_constant=_refuse_constant)
        if b"\\ud" in data.lower():
            # An escaped lone surrogate: no tokenizer accepts it, and no response could contain it.
            json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise APIError(400, f"the body is not UTF-8, from byte {error.start} on") from None
    except UnicodeEncodeError:
        raise APIError(400, "a text holds half a character (an unpaired surrogate)") from None
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise APIError(400, "the body is not a JSON object")
    kept = {name: value for name, value in fields.items() if name not in UNREAD}
    for name, allowed in ONLY.items():
        if name in kept and name not in kind.model_fields and kept.pop(name) not in allowed:
            raise APIError(400, f"this server does not support that value of `{name}`", param=name)
    # A null field counts as not set.
    given = {name: value for name, value in kept.items() if value is not None}
    try:
        return kind.model_validate(given, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where, said = ".".join(map(str, first["loc"])), first["msg"]
        if first["type"] == "extra_forbidden":
            meant = get_close_matches(where, kind.model_fields, 1)
            said = "this server has no such field" + (f"; did you mean `{meant[0]}`?" if meant else "")
        raise APIError(400, f"{where}: {said}", param=str(first["loc"][0]) if first["loc"] else None) from None


FIELDS = {
    "repetitionPenalty": "repetition_penalty", "ignoreEos": "ignore_eos", "topK": "top_k", "topP": "top_p",
    "minP": "min_p",
}  # fmt: skip
"""The manifest's settings under the names that clients use."""
SEEDED: tuple[Kind, ...] = ("Torch", "SGLang, deterministic")
"""Engines that draw by a request's seed."""


def check_given(kind: Kind, sampling: Sampling, asked: SamplingBody) -> None:
    """Raises APIError (400) for settings that this kind of engine does not support or reports other log-probs for."""
    try:
        check_sampling(sampling, kind, "this server")
    except UnsupportedError as error:
        param = FIELDS.get(str(error.where).rpartition(".")[2])
        raise APIError(400, error.message, param=param) from None
    if asked.alternatives and kind == "vLLM":
        param = "top_logprobs" if isinstance(asked, ChatBody) else "logprobs"
        raise APIError(400, "this server's engine reports log-probs of the sampled tokens only", param=param)
    if asked.seed is not None and kind not in SEEDED and sampling.temperature > 0:
        raise APIError(400, "this server's engine does not support seeds; omit it, or use temperature 0", param="seed")


def choice_key(seed: int | None, prompt: int, sample: int) -> int:
    """The stream key of one completion; with a seed, the same on every server with the same weights."""
    return stream_key(secrets.randbits(63) if seed is None else seed, "serve", prompt, sample)


def _refuse_constant(name: str) -> Literal[0]:
    raise ValueError(f"{name} is no JSON number")


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise APIError(400, f"messages[{index}] has no role", param="messages")
    made = plain_message(message)
    if not isinstance(joined_parts(made["content"]), str):
        what = "parts of a content" if isinstance(made["content"], list) else "a content"
        raise APIError(400, f"messages[{index}]: {what} must be text", param="messages")
    calls = made.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
        what = f"messages[{index}]: a tool call is a function with a name, and arguments as a JSON string"
        raise APIError(400, what, param="messages")
    return made


def _with_written_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Moves tool calls into the text, in the form that a completion writes them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    functions = [call["function"] for call in calls]
    written = [hermes.write(function["name"], function["arguments"]) for function in functions]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join([*filter(None, [joined_parts(message["content"])]), *written])}


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), dict)
    )


def from_orbit(error: OrbitError) -> APIError:
    """A client's mistake is 400, a refused adapter 422; everything else is the server's fault."""
    if isinstance(error, ModelError | GateError | OutputError):
        return APIError(422, str(error), code="adapter_refused")
    if isinstance(error, DataError | UsageError):
        return APIError(400, str(error))
    return APIError(500, str(error), code=type(error).__name__)
