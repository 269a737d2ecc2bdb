"""Completions in flight at servers: the tokens received for each, checked as they arrive.

Belongs here: one request's tokens so far. Does not belong here: which server gets it (`answer_queue`), the format of
its events (`sglang_api`, `vllm_api`).
"""

from __future__ import annotations

import asyncio
from array import array
from itertools import count
from typing import TYPE_CHECKING
from uuid import uuid4

from orbit_runtime.errors import GateError
from orbit_runtime.rollout.news import Alternatives, part_of, with_more
from orbit_runtime.rollout.served import Ask, Piece
from orbit_runtime.rollout.text import answer_text
from orbit_runtime.types import FLOATS, TOKENS, Completion, FinishReason, Request, Tokenizer

if TYPE_CHECKING:
    from orbit_runtime.rollout.replica import Replica

_PREFIX = uuid4().hex[:12]
_NUMBERS = count()


class Answer:
    """A completion in flight. Only the client's thread touches it."""

    def __init__(self, request: Request, version: int) -> None:
        """Args: version: policy version of the slot that the request names."""
        self.request = request
        self.version = version
        so_far = request.so_far
        self.tokens = array(TOKENS, so_far.token_ids_T if so_far else ())
        self.logprobs = array(FLOATS, so_far.logprobs_T if so_far else ())
        self.versions = array(TOKENS, so_far.versions_T if so_far else ())
        self.routed_experts = so_far.routed_experts if so_far else None
        before = so_far.alternatives if so_far else None
        self.alternatives: Alternatives = (
            (array(TOKENS, before[0]), array(FLOATS, before[1])) if before else (array(TOKENS), array(FLOATS))
        )
        self.finish_reason: FinishReason | None = None
        self.wanted: FinishReason | None = None
        """Why it should end early: `abort` or `deadline`."""
        self.at: Replica | None = None
        """The replica that samples it now."""
        self.timer: asyncio.TimerHandle | None = None
        """Timer of its deadline."""
        self.ask = self._next_ask()
        self._before = len(self.tokens)
        """Tokens received before the current ask."""
        self._told = len(self.tokens)
        """Tokens already reported to the listener."""

    def ask_again(self) -> None:
        """Asks for the rest of the completion: tokens received before the server was lost are kept.

        If only the finish reason is missing, the last token is sampled again.
        """
        if len(self.tokens) == self.request.sampling.max_new_tokens:
            for column in (self.tokens, self.logprobs, self.versions):
                column.pop()
            del self.alternatives[0][len(self.tokens) * self.request.alternatives :]
            del self.alternatives[1][len(self.tokens) * self.request.alternatives :]
        self.ask, self._before = self._next_ask(), len(self.tokens)

    def take_fresh(self) -> tuple[array[int], array[float], Alternatives | None] | None:
        """Tokens not yet reported. The last possible token is reported with the completion only, because it is sampled
        again if the server is lost before it sends the finish reason."""
        start, end = self._told, min(len(self.tokens), self.request.sampling.max_new_tokens - 1)
        if end <= start:
            return None
        self._told = end
        count = self.request.alternatives
        alternatives = part_of(self.alternatives, count, start, end) if count else None
        return self.tokens[start:end], self.logprobs[start:end], alternatives

    def _next_ask(self) -> Ask:
        # SGLang aborts every request whose id begins with the one that it is given: none of ours may begin another.
        return Ask(f"{_PREFIX}-{next(_NUMBERS)}.", self.request, tuple(self.tokens))

    def add(self, piece: Piece) -> None:
        """Raises GateError if a token was skipped or repeated, if there are more tokens than asked for, or if a
        finished completion has none."""
        if piece.total is not None and piece.total != len(self.tokens) - self._before + len(piece.token_ids_T):
            raise GateError(
                f"the engine counts {piece.total} tokens of request {self.request.request_id}, but told "
                f"{len(self.tokens) - self._before + len(piece.token_ids_T)}: some are missing or came twice",
                where="rollout",
            )
        if piece.adapter is not None and piece.adapter != (self.request.adapter or ""):
            raise GateError(
                f"request {self.request.request_id} asked for {self.request.adapter or 'the base'}, and the engine "
                f"applied {piece.adapter or 'the base'}",
                where="rollout",
            )
        self.tokens.extend(piece.token_ids_T)
        self.logprobs.extend(piece.logprobs_T)
        if piece.alternatives is not None:
            self.alternatives = with_more(self.alternatives, piece.alternatives)
        self.versions.extend(array(TOKENS, (self.version,)) * len(piece.token_ids_T))
        if len(self.tokens) > self.request.sampling.max_new_tokens:
            raise GateError(
                f"request {self.request.request_id} was answered with {len(self.tokens)} tokens, "
                f"{self.request.sampling.max_new_tokens} were asked for",
                where="rollout",
            )
        self.routed_experts = piece.routed_experts or self.routed_experts
        if piece.finish_reason is not None:
            self._end(piece.finish_reason)

    def _end(self, reason: FinishReason) -> None:
        if reason == "abort":
            if self.wanted is None:
                raise GateError(
                    f"the engine ended request {self.request.request_id} early, although nothing aborted it",
                    where="rollout",
                )
            reason = self.wanted
        elif not self.tokens:
            raise GateError(
                f"request {self.request.request_id} was answered with 0 tokens and finish reason {reason}",
                where="rollout",
            )
        self.finish_reason = reason

    def completion(self, tokenizer: Tokenizer) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            request_id=self.request.request_id,
            token_ids_T=self.tokens,
            logprobs_T=self.logprobs,
            versions_T=self.versions,
            finish_reason=self.finish_reason,
            text=answer_text(tokenizer, self.tokens, self.request.sampling),
            routed_experts=self.routed_experts,
            alternatives=self.alternatives if self.request.alternatives else None,
        )
