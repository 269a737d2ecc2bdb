"""Completions in the form that OpenAI's clients read, whole or streamed.

Belongs here: the objects of both endpoints, and how much of a text may already be sent. Does not belong here: HTTP
(`app`).
"""

from __future__ import annotations

import json
import time
import uuid
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.environments.tool_calls import parse_tool_calls, text_before_calls
from orbit_runtime.model_info.calls.format import CallFormat
from orbit_runtime.model_info.calls.formats import FORMATS, openings
from orbit_runtime.rollout.streaming import Alternatives
from orbit_runtime.types import FLOATS, TOKENS, FinishReason, Tokenizer

REASONS = {"stop": "stop", "length": "length", "deadline": "length", "abort": "abort"}
_UNFINISHED_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 16
"""Tokens after which bytes that form no character are sent as they are."""


@dataclass(slots=True)
class ChoicePart:
    """One choice, as far as it got."""

    index: int
    token_ids_T: array[int] = field(default_factory=lambda: array(TOKENS))
    logprobs_T: array[float] = field(default_factory=lambda: array(FLOATS))
    finish_reason: FinishReason | None = None
    """None if more tokens will come."""
    text: str = ""
    """The whole text, once it has ended."""
    alternatives: Alternatives | None = None


@dataclass
class SentText:
    """The part of one choice that its client has. The cost of a piece depends only on what is new."""

    stops: tuple[str, ...] = ()
    characters: int = 0
    tokens: int = 0
    _held: str = ""
    """Decoded but not sent, because it may be the beginning of a stop string."""
    _window: list[int] = field(default_factory=list)
    """The newest tokens; earlier ones do not affect how the next are decoded."""
    _read: int = 0
    """Tokens of the window whose text is decoded."""

    def decode(self, tokenizer: Tokenizer, new_T: Sequence[int]) -> str:
        """The text that these tokens add; empty while bytes of a character are missing."""
        self._window.extend(new_T)
        before, whole = tokenizer.decode(self._window[: self._read]), tokenizer.decode(self._window)
        is_torn = whole.endswith(_UNFINISHED_CHARACTER) and len(self._window) - self._read < _LONGEST_CHARACTER
        if is_torn or len(whole) <= len(before):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return whole[len(before) :]

    def take(self, new: str) -> str:
        """The part of the text that can be sent: without a stop string, or what may be the beginning of one."""
        text = self._held + new
        end = len(text)
        for stop in self.stops:
            at = text.find(stop)
            end = min(end, at if at >= 0 else len(text) - _overlap(text, stop))
        self._held = text[end:]
        self.characters += end
        return text[:end]

    def rest(self, text: str) -> str:
        """The unsent rest of the whole text, once it has ended."""
        return text[self.characters :]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a beginning of the stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


@dataclass(frozen=True)
class ResponseForm:
    """Formats one request's completions, for one of the two endpoints."""

    is_chat: bool
    model: str
    tokenizer: ChatTokenizer
    fingerprint: str
    """Identifies the weights, as far as one digest can."""
    with_logprobs: bool = False
    tools: Collection[str] = ()
    """Names of the tools that may be called, or a mapping from them to schemas of their parameters."""
    stops: tuple[str, ...] = ()
    top: int = 0
    """Alternatives of each token."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    provenance: bytes = b""
    """`ServedModel.provenance`."""

    @property
    def held_back(self) -> tuple[str, ...]:
        """Strings at which a streamed text ends: a client gets no tool calls as text either."""
        return (*self.stops, *openings(self._own)) if self.tools else self.stops

    @property
    def _own(self) -> CallFormat | None:
        return FORMATS.get(self.tokenizer.call_format)

    def whole(self, parts: Sequence[ChoicePart], prompt_tokens: int) -> dict[str, Any]:
        choices = [self._choice(part) for part in parts]
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage(prompt_tokens, parts)}

    def start(self, index: int) -> dict[str, Any] | None:
        """The first piece of a choice."""
        return self._piece(index, {"role": "assistant", "content": ""}, None, None) if self.is_chat else None

    def piece(self, part: ChoicePart, sent: SentText) -> list[dict[str, Any]]:
        """The new pieces of a choice; empty if all of it is held back."""
        is_done = part.finish_reason is not None
        calls = self._calls(part) if is_done else []
        fresh = slice(sent.tokens, len(part.token_ids_T))
        sent.tokens = len(part.token_ids_T)
        if is_done:
            new = sent.rest(text_before_calls(part.text, self._own) if calls else part.text)
        else:
            new = sent.take(sent.decode(self.tokenizer, part.token_ids_T[fresh]))
        logprobs = self._logprobs(part, fresh) if self.with_logprobs else None
        pieces = []
        if new or (logprobs and (logprobs.get("tokens") or logprobs.get("content"))):
            pieces.append(self._piece(part.index, {"content": new} if self.is_chat else new, logprobs, None))
        if calls:
            deltas = [{"index": at, **call} for at, call in enumerate(calls)]
            pieces.append(self._piece(part.index, {"tool_calls": deltas}, None, None))
        if part.finish_reason is not None:
            reason = "tool_calls" if calls else REASONS[part.finish_reason]
            pieces.append(self._piece(part.index, {} if self.is_chat else "", None, reason))
        return pieces

    def end(self, prompt_tokens: int, parts: Sequence[ChoicePart]) -> dict[str, Any]:
        """The piece with the usage."""
        return {**self._head(self._piece_kind), "choices": [], "usage": usage(prompt_tokens, parts)}

    @property
    def _piece_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _piece(self, index: int, content: Any, logprobs: Any, reason: str | None) -> dict[str, Any]:
        named = {"delta": content} if self.is_chat else {"text": content}
        choice = {"index": index, **named, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head(self._piece_kind), "choices": [choice]}

    def _choice(self, part: ChoicePart) -> dict[str, Any]:
        reason = REASONS[part.finish_reason or "abort"]
        logprobs = self._logprobs(part, slice(None)) if self.with_logprobs else None
        if not self.is_chat:
            return {"index": part.index, "text": part.text, "logprobs": logprobs, "finish_reason": reason}
        message: dict[str, Any] = {"role": "assistant", "content": part.text, "refusal": None}
        if calls := self._calls(part):
            before = text_before_calls(part.text, self._own).strip()
            message |= {"content": before or None, "tool_calls": calls}
            reason = "tool_calls"
        return {"index": part.index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _calls(self, part: ChoicePart) -> list[dict[str, Any]]:
        """Tool calls as the completion wrote them; none if one of them is invalid: they are then text."""
        if not self.tools:
            return []
        calls = parse_tool_calls(part.text, self.tools, self._own)
        if any(call.error for call in calls):
            return []
        return [
            {
                # The template names the result by the policy's own id.
                "id": call.id or f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in calls
        ]

    def _logprobs(self, part: ChoicePart, which: slice) -> dict[str, Any]:
        # One by one, including special tokens: a token that ended a completion was sampled like the others.
        tokens = [self.tokenizer.text_of(token) for token in part.token_ids_T[which]]
        values = part.logprobs_T[which].tolist()
        top = self._top(part, which)
        if not self.is_chat:
            named = [dict(reversed(each)) for each in top] if self.top else None
            return {"tokens": tokens, "token_logprobs": values, "top_logprobs": named, "text_offset": None}
        content = [
            {**_entry(token, value), "top_logprobs": [_entry(*each) for each in others]}
            for token, value, others in zip(tokens, values, top or [[]] * len(tokens), strict=True)
        ]
        return {"content": content, "refusal": None}

    def _top(self, part: ChoicePart, which: slice) -> list[list[tuple[str, float]]]:
        """The most probable tokens at each of these positions; empty if not requested."""
        if not self.top or part.alternatives is None:
            return []
        ids, logprobs = part.alternatives
        start, stop, _ = which.indices(len(part.token_ids_T))
        rows = range(start * self.top, stop * self.top, self.top)
        return [
            [
                (self.tokenizer.text_of(token), logprob)
                for token, logprob in zip(ids[at : at + self.top], logprobs[at : at + self.top], strict=True)
                if token >= 0
            ]
            for at in rows
        ]


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def usage(prompt_tokens: int, parts: Sequence[ChoicePart]) -> dict[str, int]:
    sampled = sum(len(part.token_ids_T) for part in parts)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled}


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"
