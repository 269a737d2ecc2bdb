"""Completions as OpenAI's clients read them, whole and in pieces.

Belongs here: the objects of both endpoints, and what of a text may be sent already. Does not belong here: HTTP (`app`).
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orbit_runtime.environments.tool_calls import OPEN, parse_tool_calls
from orbit_runtime.types import Completion, Tokenizer

REASONS = {"stop": "stop", "length": "length", "deadline": "length", "abort": "abort"}
_UNFINISHED_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass
class Sent:
    """How much of one choice its client has."""

    stops: tuple[str, ...] = ()
    characters: int = 0
    tokens: int = 0

    def take(self, text: str, *, is_done: bool) -> str:
        """What is new of the text and final: not a character of which bytes are missing, nor what may be the beginning
        of a stop."""
        end = len(text)
        if not is_done:
            end -= len(text) - len(text.rstrip(_UNFINISHED_CHARACTER))
            for stop in self.stops:
                at = text.find(stop)
                end = min(end, at if at >= 0 else len(text) - _overlap(text, stop))
        new = text[self.characters : end]
        self.characters = max(self.characters, end)
        return new

    def take_tokens(self, completion: Completion) -> slice:
        new = slice(self.tokens, len(completion.token_ids_T))
        self.tokens = len(completion.token_ids_T)
        return new


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that are the beginning of the stop."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


@dataclass(frozen=True)
class Form:
    """One request's answers, in one of the two forms."""

    is_chat: bool
    model: str
    tokenizer: Tokenizer
    fingerprint: str
    """Which weights answered, as far as one digest can say."""
    with_logprobs: bool = False
    tools: Sequence[str] = ()
    """Names that may be called."""
    stops: tuple[str, ...] = ()
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def held_back(self) -> tuple[str, ...]:
        """Where a text that is sent in pieces ends: calls of tools are no part of it either."""
        return (*self.stops, OPEN) if self.tools else self.stops

    def whole(self, completions: Sequence[Completion], prompt_tokens: int) -> dict[str, Any]:
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage(prompt_tokens, completions)}

    def start(self, index: int) -> dict[str, Any] | None:
        """The first piece of a choice."""
        return self._piece(index, {"role": "assistant", "content": ""}, None, None) if self.is_chat else None

    def piece(self, index: int, completion: Completion, sent: Sent, *, is_done: bool) -> list[dict[str, Any]]:
        """What is new of a choice; nothing where all of it is held back."""
        calls = self._calls(completion) if is_done else []
        text = completion.text.partition(OPEN)[0] if calls else completion.text
        new = sent.take(text, is_done=is_done)
        logprobs = self._logprobs(completion, sent.take_tokens(completion)) if self.with_logprobs else None
        pieces = []
        if new or (logprobs and self._has_tokens(logprobs)):
            pieces.append(self._piece(index, {"content": new} if self.is_chat else new, logprobs, None))
        if calls:
            deltas = [{"index": at, **call} for at, call in enumerate(calls)]
            pieces.append(self._piece(index, {"tool_calls": deltas}, None, None))
        if is_done:
            reason = "tool_calls" if calls else REASONS[completion.finish_reason]
            pieces.append(self._piece(index, {} if self.is_chat else "", None, reason))
        return pieces

    def end(self, prompt_tokens: int, completions: Sequence[Completion]) -> dict[str, Any]:
        """The piece that holds the usage."""
        return {**self._head(self._piece_kind), "choices": [], "usage": usage(prompt_tokens, completions)}

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

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        reason = REASONS[completion.finish_reason]
        logprobs = self._logprobs(completion, slice(None)) if self.with_logprobs else None
        if not self.is_chat:
            return {"index": index, "text": completion.text, "logprobs": logprobs, "finish_reason": reason}
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        if calls := self._calls(completion):
            before = completion.text.partition(OPEN)[0].strip()
            message |= {"content": before or None, "tool_calls": calls}
            reason = "tool_calls"
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _calls(self, completion: Completion) -> list[dict[str, Any]]:
        """Of tools, as the completion wrote them; none where one of them cannot be made: then they are text."""
        if not self.tools:
            return []
        calls = parse_tool_calls(completion.text, self.tools)
        if any(call.error for call in calls):
            return []
        return [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in calls
        ]

    def _logprobs(self, completion: Completion, which: slice) -> dict[str, Any]:
        tokens = [self.tokenizer.decode([token]) for token in completion.token_ids_T[which]]
        values = completion.logprobs_T[which].tolist()
        if not self.is_chat:
            return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": None}
        return {
            "content": [
                {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
                for token, value in zip(tokens, values, strict=True)
            ],
            "refusal": None,
        }

    @staticmethod
    def _has_tokens(logprobs: Mapping[str, Any]) -> bool:
        return bool(logprobs.get("tokens") or logprobs.get("content"))


def usage(prompt_tokens: int, completions: Sequence[Completion]) -> dict[str, int]:
    sampled = sum(len(completion.token_ids_T) for completion in completions)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled}


def event(data: Mapping[str, Any], dump: Callable[[Any], str] = json.dumps) -> bytes:
    """One server-sent event."""
    return f"data: {dump(data)}\n\n".encode()


LAST_EVENT = b"data: [DONE]\n\n"
