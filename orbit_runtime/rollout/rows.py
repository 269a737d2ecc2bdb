"""The rows of a decode batch: which request each serves, how far it is, and what it has sampled.

Belongs here: row bookkeeping as dense arrays; finished rows are overwritten by later ones, so live rows stay `[0, n)`.
Does not belong here: the model, the cache's contents, the order of admission (`torch_engine`).

Legend: `B` live rows, `C` row capacity, `T` new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from orbit_runtime.types import FinishReason, Request

Segment = tuple[str | None, int, int]


@dataclass(frozen=True)
class Work:
    """A request under way. With `forced`, those tokens are fed and scored instead of sampled ones."""

    request: Request
    forced_T: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Finished:
    """A request served: its tokens and their log-probs, under the policy version that sampled them."""

    request: Request
    reason: FinishReason
    token_ids_T: list[int]
    logprobs_T: list[float]
    version: int


class Rows:
    """Dense per-row state for at most `capacity` requests of at most `max_new` new tokens."""

    def __init__(self, capacity: int, max_new: int, device: torch.device) -> None:
        self.work: list[Work] = []
        self.version: list[int] = []
        """Policy version of the slot each row samples from."""
        self.keys_C = np.zeros(capacity, np.uint64)
        self.generated_C = torch.zeros(capacity, dtype=torch.long, device=device)
        self.position_C = torch.zeros(capacity, dtype=torch.long, device=device)
        """Where the last sampled token goes: prompt length + generated - 1."""
        self.limit_C = torch.zeros(capacity, dtype=torch.long, device=device)
        self.temperature_C1 = torch.ones(capacity, 1, device=device)
        self.top_p_C1 = torch.ones(capacity, 1, device=device)
        self.tokens_CT = torch.zeros(capacity, max_new, dtype=torch.long, device=device)
        self.logprobs_CT = torch.zeros(capacity, max_new, device=device)
        self.any_top_p = False
        self.any_stop = False
        self._segments: list[Segment] | None = None

    def __len__(self) -> int:
        return len(self.work)

    def admit(self, work: list[Work], versions: list[int]) -> None:
        rows = slice(len(self), len(self) + len(work))
        requests = [item.request for item in work]
        device = self.position_C.device
        self.work.extend(work)
        self.version.extend(versions)
        self.keys_C[rows] = np.array([request.key for request in requests], np.uint64)
        self.generated_C[rows] = 0
        self.position_C[rows] = torch.tensor([len(request.prompt_ids_T) - 1 for request in requests], device=device)
        limits = [len(item.forced_T) if item.forced_T else item.request.sampling.max_new_tokens for item in work]
        self.limit_C[rows] = torch.tensor(limits, device=device)
        self.temperature_C1[rows, 0] = torch.tensor([r.sampling.temperature for r in requests], device=device)
        self.top_p_C1[rows, 0] = torch.tensor([r.sampling.top_p for r in requests], device=device)
        self.any_top_p = self.any_top_p or any(request.sampling.top_p < 1.0 for request in requests)
        self.any_stop = self.any_stop or any(request.sampling.stop for request in requests)
        self._segments = None

    def record(self, rows: slice, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Appends one token to each of `rows`."""
        index = torch.arange(rows.start, rows.stop, device=tokens.device)
        self.tokens_CT[index, self.generated_C[rows]] = tokens
        self.logprobs_CT[index, self.generated_C[rows]] = logprobs
        self.generated_C[rows] += 1
        self.position_C[rows] += 1

    def finished(self, eos_ids: torch.Tensor) -> list[tuple[int, FinishReason]]:
        """Rows whose last token ends them, by end-of-sequence or by length."""
        n = len(self)
        generated = self.generated_C[:n]
        last = self.tokens_CT[:n].gather(1, generated[:, None] - 1)[:, 0]
        ended = torch.isin(last, eos_ids)
        done = (ended | (generated >= self.limit_C[:n])).nonzero()[:, 0].tolist()
        reasons: list[FinishReason] = ["stop" if flag else "length" for flag in ended[done].tolist()]
        forced = [self.work[row].forced_T is not None for row in done]
        # A forced row runs to the end of its tokens: an end-of-sequence inside them is only a token.
        at_limit = (generated[done] >= self.limit_C[done]).tolist() if done else []
        return [
            (row, reason)
            for row, reason, is_forced, full in zip(done, reasons, forced, at_limit, strict=True)
            if full or not is_forced
        ]

    def finish(self, done: Sequence[tuple[int, FinishReason]]) -> list[Finished]:
        """What rows have sampled, read out in one go."""
        if not done:
            return []
        index = [row for row, _ in done]
        counts = self.generated_C[index].tolist()
        tokens, logprobs = self.tokens_CT[index].tolist(), self.logprobs_CT[index].tolist()
        return [
            Finished(
                self.work[row].request, reason, tokens[at][: counts[at]], logprobs[at][: counts[at]], self.version[row]
            )
            for at, (row, reason) in enumerate(done)
        ]

    def remove(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """Drops rows; returns (source, target) of the live rows that moved into the gaps."""
        gone = set(rows)
        self._segments = None
        remaining = len(self) - len(gone)
        targets = sorted(row for row in gone if row < remaining)
        sources = [row for row in range(remaining, len(self)) if row not in gone]
        for source, target in zip(sources, targets, strict=True):
            self.work[target], self.version[target] = self.work[source], self.version[source]
        del self.work[remaining:], self.version[remaining:]
        if sources:
            self.keys_C[targets] = self.keys_C[sources]
            for column in (
                self.generated_C, self.position_C, self.limit_C, self.temperature_C1, self.top_p_C1,
                self.tokens_CT, self.logprobs_CT,
            ):  # fmt: skip
                column[targets] = column[sources]
        return sources, targets

    def segments(self) -> list[Segment]:
        """(adapter, first row, end row) of contiguous rows under one adapter."""
        if self._segments is None:
            count = range(len(self))
            adapters = [item.request.adapter for item in self.work]
            self._segments = merge_segments(adapters, count, [row + 1 for row in count])
        return self._segments


def merge_segments(adapters: Sequence[str | None], starts: Sequence[int], ends: Sequence[int]) -> list[Segment]:
    """Neighbouring spans under one adapter become one."""
    merged: list[Segment] = []
    for adapter, start, end in zip(adapters, starts, ends, strict=True):
        if merged and merged[-1][0] == adapter:
            merged[-1] = (adapter, merged[-1][1], end)
        else:
            merged.append((adapter, start, end))
    return merged
