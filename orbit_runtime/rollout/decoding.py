"""Decoding in this process: requests wait, join the batch, get one token per step, and leave it.

Belongs here: admission, prefill and decode steps. Does not belong here: row bookkeeping (`rows`), attention (`cache`),
slots and handling of finished requests (`torch_engine`).

A finished row leaves the batch at once and a waiting request takes its place. Samples of one prompt share its prefill.

Legend: `B` live rows, `V` vocabulary, `P` prompts of a prefill.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from orbit_runtime.policy.logprobs import logprobs_of, token_scores
from orbit_runtime.policy.model import Policy
from orbit_runtime.policy.packed import Branch, to_device
from orbit_runtime.policy.routing import Routing
from orbit_runtime.policy.whole_rows import OwnCache
from orbit_runtime.rollout.cache import KVCache, TokenHistory
from orbit_runtime.rollout.rows import ActiveRequest, FinishedRequest, Rows, merge_segments
from orbit_runtime.rollout.sampling import draw, most_probable, uniforms
from orbit_runtime.rollout.streaming import TokenDeltas
from orbit_runtime.types import FLOATS, TOKENS, FinishReason, Tokenizer

PREFILL_TOKENS = 16384
"""Maximum prompt tokens of one prefill pass, so that its activations stay bounded."""


@dataclass(frozen=True)
class ScoreReadings:
    """Readings of scored tokens: those of prompts by adapter and prompt, those fed one by one by request."""

    logprobs: dict[tuple[str | None, tuple[int, ...]], list[float]] = field(default_factory=dict)
    top: dict[tuple[str | None, tuple[int, ...]], list[int]] = field(default_factory=dict)
    """Most probable token for each position of a prompt from its second on."""
    forced_top: dict[int, list[int]] = field(default_factory=dict)


class DecodingBatch:
    """One batch and the requests that wait for it. Not thread-safe."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: Tokenizer,
        version_of: Callable[[str | None], int],
        max_running_requests: int,
        *,
        notes: Routing | None = None,
    ) -> None:
        """
        Args:
            version_of: policy version of a slot.
            notes: router whose choice of experts is recorded for each token; None to record nothing.
        """
        self._policy = policy
        self._notes = notes
        self._tokenizer = tokenizer
        self._eos = tuple(tokenizer.eos_ids)
        self._version_of = version_of
        self._max_running = max_running_requests
        self._waiting: deque[ActiveRequest] = deque()
        self._is_grown = False
        """Something was added that may not have room yet."""
        self._rows = Rows(0, 0)
        self._cache = _build_cache(policy)

    def __len__(self) -> int:
        """Number of requests in flight."""
        return len(self._waiting) + len(self._rows)

    def under_way(self) -> Iterable[ActiveRequest]:
        yield from self._rows.work
        yield from self._waiting

    def add(self, work: Collection[ActiveRequest]) -> None:
        self._waiting.extend(work)
        self._is_grown = True

    def step(self, told: ScoreReadings | None = None) -> list[FinishedRequest]:
        """Runs a prefill of waiting requests, or a decode step; returns the requests that it finished.

        When given tokens are scored, `told` receives the readings that rows do not hold.
        """
        # Not inference_mode: layers keep views of the base that the trainer's backward pass needs as well.
        with torch.no_grad():
            if self._is_grown and self._waiting:
                self._make_room()
            free = self._rows.capacity - len(self._rows)
            # Joining costs a prefill, so wait until a quarter of the rows is free or nothing else is left to do.
            if self._waiting and (not len(self._rows) or free >= max(1, self._rows.capacity // 4)):
                self._admit(told)
            else:
                self._decode(told)
        return self._leave(self._finished())

    def remove(self, request_ids: Collection[int], reason: FinishReason) -> list[FinishedRequest]:
        """Ends these requests, with the tokens sampled so far."""
        gone = [item for item in self._waiting if item.request.request_id in request_ids]
        if gone:
            self._waiting = deque(item for item in self._waiting if item.request.request_id not in request_ids)
        rows = [row for row, item in enumerate(self._rows.work) if item.request.request_id in request_ids]
        return [*self._leave([(row, reason) for row in rows]), *(_unstarted(item, reason) for item in gone)]

    def take_deltas(self) -> TokenDeltas | None:
        """New tokens of streamed requests in the batch."""
        return self._rows.take_deltas()

    def _leave(self, done: list[tuple[int, FinishReason]]) -> list[FinishedRequest]:
        if not done:
            return []
        rows = self._rows
        finished = rows.finish(done)
        length = int(rows.position_C[: len(rows)].max())
        sources, targets = rows.remove([row for row, _ in done])
        if sources:
            device = self._policy.device
            self._cache.move_rows(to_device(sources, device), to_device(targets, device), length)
        return finished

    def _make_room(self) -> None:
        """Makes room in rows and cache for the requests in flight, up to the maximum number of running rows."""
        self._is_grown = False
        capacity = min(self._max_running, len(self))
        max_new, longest = (max(getattr(item, name) for item in self._waiting) for name in ("max_new", "longest"))
        if not len(self._rows):
            self._rows = Rows(capacity, max_new)
        elif capacity > self._rows.capacity or max_new > self._rows.max_new:
            self._rows.grow(capacity, max_new)
        self._cache.reserve(self._rows.capacity, longest, live=len(self._rows))

    def _admit(self, told: ScoreReadings | None) -> None:
        """Moves waiting requests into free rows, runs each distinct prompt once and samples first tokens."""
        rows, waiting = self._rows, self._waiting
        first = len(rows)
        admitted: list[ActiveRequest] = []
        prompts: dict[tuple[str | None, tuple[int, ...]], int] = {}
        tokens = 0
        while waiting and first + len(admitted) < rows.capacity:
            identity = _identity(waiting[0])
            if identity not in prompts:
                length = len(identity[1])
                if prompts and tokens + length > PREFILL_TOKENS:
                    break
                tokens += length
                prompts[identity] = len(prompts)
            admitted.append(waiting.popleft())
        # A forward pass applies adapters to runs of tokens, so prompts of one adapter are adjacent.
        ordered = sorted(prompts, key=lambda identity: identity[0] or "")
        place = {identity: index for index, identity in enumerate(ordered)}
        prompt_of_row = [place[_identity(item)] for item in admitted]
        with self._noting() as noted:
            logits_BV = self._prefill(ordered, prompt_of_row, first, told)
        rows.admit(admitted, [self._version_of(item.request.adapter) for item in admitted])
        if noted:
            ends = np.cumsum([len(prompt) for _, prompt in ordered])
            of_prompt = np.split(noted().cpu().numpy(), ends[:-1])
            for row, prompt in enumerate(prompt_of_row, first):
                rows.routed[row].append(of_prompt[prompt])
        self._sample(logits_BV, rows, slice(first, len(rows)), told)

    def _prefill(
        self,
        prompts: list[tuple[str | None, tuple[int, ...]]],
        prompt_of_row: list[int],
        first_row: int,
        told: ScoreReadings | None,
    ) -> torch.Tensor:
        """Runs distinct prompts and fills the cache rows; returns fp32 next-token logits `[rows, V]`."""
        policy = self._policy
        batch = policy.pack([Branch(index, prompt, (0,)) for index, (_, prompt) in enumerate(prompts)])
        lengths = [len(prompt) for _, prompt in prompts]
        starts = np.cumsum([0, *lengths])[:-1].tolist()
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        plan = self._cache.prefill(batch, policy.kernel)
        adapters = [adapter for adapter, _ in prompts]
        with policy.injected.selection.use(_selected(merge_segments(adapters, starts, ends))):
            hidden = policy.sampled_hidden(batch.token_ids_T, batch.position_T, plan)
        index, starts_P, lengths_P = (to_device(each, policy.device) for each in (prompt_of_row, starts, lengths))
        self._cache.keep_prompts(first_row, index, starts_P, lengths_P, plan)
        if told is not None:
            for identity, start, end in zip(prompts, starts, ends, strict=True):
                targets = batch.token_ids_T[start + 1 : end]
                logprobs, top = token_scores(
                    hidden[start : end - 1], targets, policy.head, vocabulary=policy.vocabulary
                )
                told.logprobs[identity], told.top[identity] = logprobs.tolist(), top.tolist()
        return policy.head(hidden[batch.target_source_R]).float()[index]

    def _decode(self, told: ScoreReadings | None) -> None:
        rows = self._rows
        n = len(rows)
        policy, device = self._policy, self._policy.device
        last_B, position_B = (to_device(column[:n], device) for column in (rows.last_C, rows.position_C))
        plan = self._cache.plan(last_B, rows.position_C[:n], policy.kernel)
        with policy.injected.selection.use(_selected(rows.segments())), self._noting() as noted:
            hidden = policy.sampled_hidden(last_B, position_B, plan)
        if noted:
            for routed, chosen_1LC in zip(rows.routed, np.split(noted().cpu().numpy(), n), strict=True):
                routed.append(chosen_1LC)
        self._sample(policy.head(hidden).float(), rows, slice(0, n), told)

    def _noting(self) -> AbstractContextManager[Callable[[], torch.Tensor] | None]:
        return self._notes.noted() if self._notes else nullcontext()

    def _sample(self, logits_BV: torch.Tensor, rows: Rows, which: slice, told: ScoreReadings | None) -> None:
        generated = rows.generated_C[which]
        device = logits_BV.device
        if rows.work[which.start].forced_T is not None:
            # Scoring never mixes with sampling: `score` runs alone.
            forced = [item.forced_T for item in rows.work[which]]
            tokens = to_device([f[t] for f, t in zip(forced, generated, strict=True) if f], device)
            logprobs = logprobs_of(logits_BV, tokens)[0]
            if told is not None:
                for item, top in zip(rows.work[which], logits_BV.argmax(-1).tolist(), strict=True):
                    told.forced_top.setdefault(item.request.request_id, []).append(top)
        else:
            uniforms_B = to_device(uniforms(rows.keys_C[which], generated), device)
            temperature = to_device(rows.temperature_C1[which], device) if rows.any_temperature else None
            truncation = rows.truncation(which, device)
            logits_BV = rows.logits.apply(logits_BV, which)
            tokens, logprobs = draw(logits_BV, uniforms_B, temperature, truncation)
            if rows.most_alternatives:
                rows.record_alternatives(
                    which, *most_probable(logits_BV, temperature, truncation, rows.most_alternatives)
                )
        rows.record(which, tokens, logprobs)

    def _finished(self) -> list[tuple[int, FinishReason]]:
        rows = self._rows
        done = rows.finished(self._eos)
        if not rows.any_stop:
            return done
        ended = {row for row, _ in done}
        for row, item in enumerate(rows.work):
            if item.request.sampling.stop and row not in ended and self._hits_stop(rows, row):
                done.append((row, "stop"))
        return sorted(done)

    def _hits_stop(self, rows: Rows, row: int) -> bool:
        """Checks only the text that the newest token can have completed."""
        stops = rows.work[row].request.sampling.stop
        count = int(rows.generated_C[row])
        window = max(len(stop) for stop in stops) + 8
        text = self._tokenizer.decode(rows.tokens_CT[row, max(0, count - window) : count].tolist())
        return any(stop in text for stop in stops)


def _build_cache(policy: Policy) -> Any:
    """What steps read: one of three kinds with the same methods, each of which reads the plans that it makes."""
    mode = policy.mode
    if mode.decode == "pages":
        return KVCache()
    return OwnCache(policy.model.config) if mode.decode == "cache" else TokenHistory(mode.rows == "single")


def _identity(item: ActiveRequest) -> tuple[str | None, tuple[int, ...]]:
    """Requests with the same identity share a prefill."""
    return item.request.adapter, item.prefill_T


def _unstarted(item: ActiveRequest, reason: FinishReason) -> FinishedRequest:
    so_far = item.request.so_far
    if so_far is None:
        return FinishedRequest(item.request, reason, array(TOKENS), array(FLOATS), array(TOKENS), [])
    return FinishedRequest(
        item.request, reason, so_far.token_ids_T, so_far.logprobs_T, so_far.versions_T, [], so_far.alternatives
    )


def _selected(segments: list[tuple[str | None, int, int]]) -> str | list[tuple[str | None, int, int]] | None:
    """A single segment covers the whole batch, which is the layers' fast path."""
    return segments[0][0] if len(segments) == 1 else segments
