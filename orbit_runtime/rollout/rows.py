"""The rows of a decode batch: the request that each serves, its position, and what it has sampled.

Belongs here: row bookkeeping as dense arrays; later rows overwrite finished ones, so live rows stay `[0, n)`. Does not
belong here: the model, the cache's contents, the order of admission (`decoding`).

Legend: `B` live rows, `C` row capacity, `T` new tokens.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from orbit_runtime.policy.packed import to_device
from orbit_runtime.rollout.requests import end_ids
from orbit_runtime.rollout.sampling import RowLogits, Truncation
from orbit_runtime.rollout.streaming import NONE, Alternatives, TokenDeltas, part_of
from orbit_runtime.types import FLOATS, TOKENS, FinishReason, Request

Segment = tuple[str | None, int, int]
UNCUT: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
UNTOLD = np.iinfo(np.int64).max
"""More tokens than a row can have: nothing of the row is reported."""


@dataclass(frozen=True)
class ActiveRequest:
    """A request in flight. With `forced_T`, those tokens are fed and scored instead of sampled ones."""

    request: Request
    forced_T: tuple[int, ...] | None = None

    @property
    def num_done(self) -> int:
        """Tokens of the completion that an earlier request sampled."""
        so_far = self.request.so_far
        return len(so_far.token_ids_T) if so_far else 0

    @property
    def max_new(self) -> int:
        """Maximum tokens of the completion, including those it already has."""
        return len(self.forced_T) if self.forced_T else self.request.sampling.max_new_tokens

    @property
    def prefill_T(self) -> tuple[int, ...]:
        so_far = self.request.so_far
        return (*self.request.prompt_ids_T, *so_far.token_ids_T) if so_far else self.request.prompt_ids_T

    @property
    def longest(self) -> int:
        return len(self.request.prompt_ids_T) + self.max_new


@dataclass(frozen=True)
class FinishedRequest:
    """A finished request: its tokens, their log-probs, and the policy versions that sampled them."""

    request: Request
    reason: FinishReason
    token_ids_T: array[int]
    logprobs_T: array[float]
    versions_T: array[int]
    routed: list[np.ndarray]
    """int16 `[tokens, L, C]` of each pass: the prompt, then each sampled token but the last; empty if not recorded."""
    alternatives: Alternatives | None = None


class Rows:
    """Dense per-row state, on the host, for at most `capacity` requests of at most `max_new` new tokens."""

    def __init__(self, capacity: int, max_new: int) -> None:
        self.capacity = capacity
        self.max_new = max_new
        self.work: list[ActiveRequest] = []
        self.version: list[int] = []
        """Policy version of the slot each row samples from."""
        self.routed: list[list[np.ndarray]] = []
        """Experts of its tokens so far, if recorded."""
        self.alternatives: list[Alternatives | None] = []
        """Alternatives of its tokens so far, if requested."""
        self.most_alternatives = 0
        self.keys_C = np.zeros(capacity, np.uint64)
        self.generated_C = np.zeros(capacity, np.int64)
        self.position_C = np.zeros(capacity, np.int64)
        """Position of the last sampled token: prompt length + generated - 1."""
        self.limit_C = np.zeros(capacity, np.int64)
        self.told_C = np.full(capacity, UNTOLD, np.int64)
        """Tokens of streamed requests already reported."""
        self.temperature_C1 = np.ones((capacity, 1), np.float32)
        self.top_k_C1 = np.zeros((capacity, 1), np.int64)
        self.top_p_C1 = np.ones((capacity, 1), np.float32)
        self.min_p_C1 = np.zeros((capacity, 1), np.float32)
        self.logits = RowLogits(capacity)
        self.last_C = np.zeros(capacity, np.int64)
        """The last sampled token."""
        self.tokens_CT = np.zeros((capacity, max_new), np.int32)
        self.logprobs_CT = np.zeros((capacity, max_new), np.float32)
        self.any_temperature = False
        """Whether any row's temperature differs from 1."""
        self.any_top_k = self.any_top_p = self.any_min_p = False
        self.any_stop = False
        self.any_streamed = False
        self.any_ends = False
        """Whether any row has end tokens other than the model's own."""
        self._segments: list[Segment] | None = None

    def __len__(self) -> int:
        return len(self.work)

    def admit(self, work: list[ActiveRequest], versions: list[int]) -> None:
        rows = slice(len(self), len(self) + len(work))
        requests = [item.request for item in work]
        self.work.extend(work)
        self.version.extend(versions)
        self.routed.extend([] for _ in work)
        self.alternatives.extend(_alternatives_so_far(request) for request in requests)
        self.most_alternatives = max(self.most_alternatives, *(request.alternatives for request in requests))
        self.keys_C[rows] = [request.key for request in requests]
        self.generated_C[rows] = [item.num_done for item in work]
        self.position_C[rows] = [len(item.request.prompt_ids_T) + item.num_done - 1 for item in work]
        self.limit_C[rows] = [item.max_new for item in work]
        for row, item in enumerate(work, rows.start):
            if item.request.so_far:
                self.tokens_CT[row, : item.num_done] = item.request.so_far.token_ids_T
                self.logprobs_CT[row, : item.num_done] = item.request.so_far.logprobs_T
        self.temperature_C1[rows, 0] = [request.sampling.temperature for request in requests]
        # Truncation never removes the most likely token; its log-prob is under the whole distribution.
        cut = [replace(each.sampling, **UNCUT) if not each.sampling.temperature else each.sampling for each in requests]
        self.top_k_C1[rows, 0] = [sampling.top_k for sampling in cut]
        self.top_p_C1[rows, 0] = [sampling.top_p for sampling in cut]
        self.min_p_C1[rows, 0] = [sampling.min_p for sampling in cut]
        self.logits.admit(requests)
        self.any_top_k = self.any_top_k or any(sampling.top_k for sampling in cut)
        self.any_min_p = self.any_min_p or any(sampling.min_p for sampling in cut)
        self.any_ends = self.any_ends or any(
            request.sampling.ignore_eos or request.sampling.stop_token_ids for request in requests
        )
        self.any_temperature = self.any_temperature or any(request.sampling.temperature != 1.0 for request in requests)
        self.any_top_p = self.any_top_p or any(sampling.top_p < 1.0 for sampling in cut)
        self.any_stop = self.any_stop or any(request.sampling.stop for request in requests)
        self.any_streamed = self.any_streamed or any(request.is_streamed for request in requests)
        self.told_C[rows] = [item.num_done if item.request.is_streamed else UNTOLD for item in work]
        self._segments = None

    def grow(self, capacity: int, max_new: int) -> None:
        """Makes room for more and longer rows; live ones stay."""
        wider = Rows(max(capacity, self.capacity), max(max_new, self.max_new))
        for name, column in vars(wider).items():
            if isinstance(column, np.ndarray):
                old = getattr(self, name)
                column[tuple(slice(0, size) for size in old.shape)] = old
                setattr(self, name, column)
        self.logits.grow(wider.capacity)
        self.capacity, self.max_new = wider.capacity, wider.max_new

    def record(self, rows: slice, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Appends one token to each of `rows`."""
        index, generated = np.arange(rows.start, rows.stop), self.generated_C[rows]
        # fp64 holds both as they are: one copy, which waits once for the device.
        self.last_C[rows], self.logprobs_CT[index, generated] = torch.stack((tokens.double(), logprobs)).cpu().numpy()
        self.tokens_CT[index, generated] = self.last_C[rows]
        self.logits.record(rows, tokens)
        generated += 1
        self.position_C[rows] += 1

    def record_alternatives(self, rows: slice, tokens_BK: torch.Tensor, logprobs_BK: torch.Tensor) -> None:
        """Records, for each of `rows`, the most probable tokens at the position of the one that `record` appends."""
        for row, tokens, logprobs in zip(
            range(rows.start, rows.stop), tokens_BK.tolist(), logprobs_BK.tolist(), strict=True
        ):
            kept = self.alternatives[row]
            if kept is None:
                continue
            count = self.work[row].request.alternatives
            pairs = [
                (token, logprob) if math.isfinite(logprob) else NONE
                for token, logprob in zip(tokens[:count], logprobs[:count], strict=True)
            ]
            pairs += [NONE] * (count - len(pairs))
            kept[0].extend(token for token, _ in pairs)
            kept[1].extend(logprob for _, logprob in pairs)

    def take_deltas(self) -> TokenDeltas | None:
        """Tokens of streamed requests that were not reported yet."""
        if not self.any_streamed:
            return None
        n = len(self)
        rows = np.flatnonzero(self.generated_C[:n] > self.told_C[:n])
        if not len(rows):
            return None
        told, generated = self.told_C[rows], self.generated_C[rows]
        counts = generated - told
        if len(rows) == counts.sum():
            # One token each, as after most steps, which should not wait for more arithmetic than this.
            index, places = rows, told
        else:
            index = np.repeat(rows, counts)
            # Each row's first new position, then one more for every further token.
            places = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts - told, counts)
        self.told_C[rows] = generated
        alternatives = (
            {
                self.work[row].request.request_id: part_of(kept, self.work[row].request.alternatives, start, end)
                for row, start, end in zip(rows.tolist(), told.tolist(), generated.tolist(), strict=True)
                if (kept := self.alternatives[row]) is not None
            }
            if self.most_alternatives
            else {}
        )
        return TokenDeltas(
            array("q", [self.work[row].request.request_id for row in rows.tolist()]),
            array(TOKENS, counts.astype(np.int32).tobytes()),
            array(TOKENS, self.tokens_CT[index, places].tobytes()),
            array(FLOATS, self.logprobs_CT[index, places].tobytes()),
            alternatives,
        )

    def finished(self, eos_ids: Sequence[int]) -> list[tuple[int, FinishReason]]:
        """Rows that end with their last token, by an end token or by length."""
        full = self.generated_C[: len(self)] >= self.limit_C[: len(self)]
        ended = np.isin(self.last_C[: len(self)], eos_ids) if eos_ids else np.zeros_like(full)
        if self.any_ends:
            ended = np.array(
                [
                    last in end_ids(item.request.sampling, eos_ids)
                    for item, last in zip(self.work, self.last_C[: len(self)].tolist(), strict=True)
                ]
            )
        done: list[tuple[int, FinishReason]] = []
        for row in np.flatnonzero(ended | full).tolist():
            # A forced row runs to the end of its tokens: an end token inside them is an ordinary token.
            if full[row] or self.work[row].forced_T is None:
                done.append((row, "stop" if ended[row] else "length"))
        return done

    def finish(self, done: Sequence[tuple[int, FinishReason]]) -> list[FinishedRequest]:
        """The results of these rows."""
        return [
            FinishedRequest(
                self.work[row].request,
                reason,
                array(TOKENS, self.tokens_CT[row, : self.generated_C[row]].tobytes()),
                array(FLOATS, self.logprobs_CT[row, : self.generated_C[row]].tobytes()),
                self._versions(row),
                self.routed[row],
                self.alternatives[row],
            )
            for row, reason in done
        ]

    def _versions(self, row: int) -> array[int]:
        so_far = self.work[row].request.so_far
        before = so_far.versions_T if so_far else array(TOKENS)
        return before + array(TOKENS, (self.version[row],)) * (int(self.generated_C[row]) - len(before))

    def remove(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """Drops rows; returns (sources, targets) of the live rows that moved into the gaps."""
        gone = set(rows)
        self._segments = None
        remaining = len(self) - len(gone)
        targets = sorted(row for row in gone if row < remaining)
        sources = [row for row in range(remaining, len(self)) if row not in gone]
        for source, target in zip(sources, targets, strict=True):
            self.work[target], self.version[target] = self.work[source], self.version[source]
            self.routed[target] = self.routed[source]
            self.alternatives[target] = self.alternatives[source]
        del self.work[remaining:], self.version[remaining:], self.routed[remaining:], self.alternatives[remaining:]
        if sources:
            for column in (
                self.keys_C, self.generated_C, self.position_C, self.limit_C, self.told_C, self.temperature_C1,
                self.top_k_C1, self.top_p_C1, self.min_p_C1, self.last_C, self.tokens_CT, self.logprobs_CT,
            ):  # fmt: skip
                column[targets] = column[sources]
        self.logits.remove(remaining, sources, targets)
        return sources, targets

    def truncation(self, rows: slice, device: torch.device) -> Truncation:
        def column(values_C1: np.ndarray) -> torch.Tensor:
            return to_device(values_C1[rows], device)

        # One value for all rows needs no answer of the device to how many tokens are looked at.
        top_k = self.top_k_C1[rows]
        is_one = 0 < top_k.min() == top_k.max()
        return Truncation(
            (int(top_k.max()) if is_one else column(self.top_k_C1)) if self.any_top_k else None,
            column(self.top_p_C1) if self.any_top_p else None,
            column(self.min_p_C1) if self.any_min_p else None,
        )

    def segments(self) -> list[Segment]:
        """(adapter, first row, end row) of contiguous rows under one adapter."""
        if self._segments is None:
            count = range(len(self))
            adapters = [item.request.adapter for item in self.work]
            self._segments = merge_segments(adapters, count, [row + 1 for row in count])
        return self._segments


def _alternatives_so_far(request: Request) -> Alternatives | None:
    if not request.alternatives:
        return None
    before = request.so_far.alternatives if request.so_far else None
    return (before[0][:], before[1][:]) if before else (array(TOKENS), array(FLOATS))


def merge_segments(adapters: Sequence[str | None], starts: Sequence[int], ends: Sequence[int]) -> list[Segment]:
    """Merges neighbouring spans under one adapter."""
    merged: list[Segment] = []
    for adapter, start, end in zip(adapters, starts, ends, strict=True):
        if merged and merged[-1][0] == adapter:
            merged[-1] = (adapter, merged[-1][1], end)
        else:
            merged.append((adapter, start, end))
    return merged
