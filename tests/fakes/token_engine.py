"""The queue of an engine that samples one token a turn for each request, the same for the same key and position."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass, field

from orbit_runtime.types import Completion, FinishReason, Request


@dataclass
class _Row:
    request: Request
    tokens: list[int]
    versions: list[int]


def token(key: int, position: int) -> int:
    return 97 + (key + 7 * position) % 26


@dataclass
class TokenEngine:
    """Its policy version is the number in the adapter's name."""

    length: Callable[[Request], int]
    """Tokens of a request's completion."""
    steps: float = 0
    """How many tokens of each it may still sample, before it waits."""
    lie: int = 0
    """Added to each version that it tells."""
    sampled: list[tuple[int, int, int]] = field(default_factory=list)
    """(key, position, version) of every token, in the order they were paid for."""
    rows: dict[int, _Row] = field(default_factory=dict)
    ended: list[Completion] = field(default_factory=list)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert request.request_id not in self.rows
            before = request.so_far
            tokens, versions = (before.token_ids_T.tolist(), before.versions_T.tolist()) if before else ([], [])
            self.rows[request.request_id] = _Row(request, tokens, versions)

    async def completions(self) -> AsyncGenerator[Completion]:
        while self.rows or self.ended:
            await asyncio.sleep(0 if self.steps else 0.001)
            if self.steps:
                self._step()
                self.steps -= 1
            while self.ended:
                yield self.ended.pop(0)

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        for request_id in [*self.rows] if request_ids is None else request_ids:
            if request_id in self.rows:
                self._end(request_id, "abort")

    def _step(self) -> None:
        for request_id, row in [*self.rows.items()]:
            version = int(str(row.request.adapter).removeprefix("policy-v"))
            self.sampled.append((row.request.key, len(row.tokens), version))
            row.tokens.append(token(row.request.key, len(row.tokens)))
            row.versions.append(version + self.lie)
            if len(row.tokens) >= self.length(row.request):
                self._end(request_id, "stop")

    def _end(self, request_id: int, reason: FinishReason) -> None:
        row = self.rows.pop(request_id)
        text, logprobs = "".join(map(chr, row.tokens)), [-0.5] * len(row.tokens)
        self.ended.append(Completion(request_id, row.tokens, logprobs, row.versions, reason, text))  # type: ignore[arg-type]
