"""The torch engine: batched generation on the base it shares with the trainer, under named adapter slots.

Belongs here: admission, prefill, decoding, scoring by the same passes, slots by name.
Does not belong here: row bookkeeping (`rows`), attention (`cache`), what a slot holds (`adapters.state`).

A finished row leaves the batch at once and a waiting request takes its place. Samples of one prompt share its prefill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from orbit_runtime.adapters.difference import explain_difference
from orbit_runtime.adapters.layer import Applied
from orbit_runtime.adapters.state import CONFIG_FILE, applied_digest, load_slot, remove_slot, slot_digest, slot_files
from orbit_runtime.errors import DataError, GateError
from orbit_runtime.policy.attention import Kernel
from orbit_runtime.policy.logprobs import token_logprobs
from orbit_runtime.policy.model import Policy
from orbit_runtime.policy.packed import Branch, PackedPlan
from orbit_runtime.rollout.cache import KVCache
from orbit_runtime.rollout.history import TokenHistory
from orbit_runtime.rollout.rows import Finished, Rows, Work, merge_segments
from orbit_runtime.rollout.sampling import draw, uniforms
from orbit_runtime.rollout.text import answer_text
from orbit_runtime.types import (
    AdapterFiles,
    Completion,
    FinishReason,
    Request,
    Sampling,
    Scored,
    ServerReading,
    Tokenizer,
)

BASE_VERSION = -1
PREFILL_TOKENS = 16384
"""Prompt tokens of one prefill pass at most, so that its activations stay bounded."""
SCORED_BY_DECODING = 2
"""Tokens at the end of a scored sequence that go through decode steps, so that a score exercises both passes."""


@dataclass(frozen=True)
class Slot:
    version: int
    digest: str
    config: bytes
    """`adapter_config.json` as it was loaded."""


class TorchEngine:
    """An `Engine` in this process. Not safe for use by two threads at once."""

    def __init__(self, policy: Policy, tokenizer: Tokenizer, *, max_running_requests: int) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        self._max_running = max_running_requests
        self._eos = tuple(tokenizer.eos_ids)
        self._cache = KVCache() if policy.packs else TokenHistory()
        # One query per row: on a CPU the explicit product beats the fused kernel, which is made for long queries.
        self._kernel: Kernel = "Eager" if policy.device.type == "cpu" else policy.kernel
        self._slots: dict[str, Slot] = {}
        self._retired: set[str] = set()

    # --- slots ---

    def load_adapter(self, name: str, adapter: AdapterFiles) -> None:
        """Fills slot `name` from the published bytes; a name that is loaded or retired is refused."""
        if name in self._slots or name in self._retired:
            raise GateError(f"adapter name {name!r} was used before", fix="publish every version under a new name")
        load_slot(self._policy.injected.layers, name, adapter.files)
        self._slots[name] = Slot(adapter.version, adapter.digest, bytes(adapter.files[CONFIG_FILE]))

    def unload_adapter(self, name: str) -> None:
        self._slot(name)
        del self._slots[name]
        self._retired.add(name)
        remove_slot(self._policy.injected.layers, name)

    def adapter_digest(self, name: str) -> str:
        return slot_digest(self._policy.injected.layers, name, self._slot(name).config)

    def explain_slot(self, name: str, published: AdapterFiles) -> str:
        held = slot_files(self._policy.injected.layers, name, self._slot(name).config)
        return explain_difference(published.files, held)

    @property
    def name(self) -> str:
        return "the engine"

    @property
    def reads_back(self) -> bool:
        return True

    def copies(self) -> tuple[TorchEngine, ...]:
        return (self,)

    def sleep(self) -> None:
        """It computes with the trainer's own weights, and keeps no cache between calls."""

    def wake(self) -> None: ...

    def read_servers(self) -> tuple[ServerReading, ...]:
        return ()

    def adapters(self) -> tuple[str, ...]:
        return tuple(self._slots)

    def close(self) -> None:
        for name in self.adapters():
            self.unload_adapter(name)

    def _slot(self, name: str) -> Slot:
        if name not in self._slots:
            raise GateError(f"no adapter {name!r} in the engine; it holds {', '.join(self._slots) or 'none'}")
        return self._slots[name]

    def _version(self, adapter: str | None) -> int:
        return BASE_VERSION if adapter is None else self._slot(adapter).version

    # --- generation ---

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yields completions as they finish.

        Raises:
            GateError: a request names an adapter that is not loaded.
            DataError: a prompt is empty.
        """
        for request in requests:
            self._version(request.adapter)
            if not request.prompt_ids_T:
                raise DataError(f"request {request.request_id} has an empty prompt")
        # Not inference_mode: layers keep views of the base that the trainer's backward needs as well.
        with torch.no_grad():
            for finished in self._run([Work(request) for request in requests]):
                yield self._completion(finished)

    def score(
        self,
        token_ids_T: Sequence[int],
        adapters: Sequence[str | None],
        behind: int | None = None,
        standing: Sequence[str] = (),
    ) -> list[Scored]:
        """Teacher-forced: a prefill of all but the last few tokens, then decode steps, every adapter in one batch.

        Two calls share no keys and values here: there is nothing to read `behind`. Digests are read when asked for.
        """
        tail = min(SCORED_BY_DECODING, len(token_ids_T) - 1)
        prompt, forced = tuple(token_ids_T[:-tail]), tuple(token_ids_T[-tail:])
        work = [Work(Request(index, 0, prompt, Sampling(), name), forced) for index, name in enumerate(adapters)]
        heads: dict[str | None, list[float]] = {}
        tails: dict[int, list[float]] = {}
        with torch.no_grad(), self._policy.traced() as trace:
            for finished in self._run(work, heads):
                tails[finished.request.request_id] = finished.logprobs_T
        return [
            Scored((0.0, *heads[name], *tails[index]), _applied(trace, name) if name else None)
            for index, name in enumerate(adapters)
        ]

    def _run(
        self, work: Sequence[Work], prompt_logprobs: dict[str | None, list[float]] | None = None
    ) -> Iterator[Finished]:
        """Serves every work item, each yielded when its last token is there.

        With `prompt_logprobs` given, the prompts' own log-probs are left in it, by adapter.
        """
        waiting = deque(work)
        if not waiting:
            return
        capacity = min(self._max_running, len(waiting))
        max_new = max(len(item.forced_T or ()) or item.request.sampling.max_new_tokens for item in waiting)
        longest = max(
            len(item.request.prompt_ids_T) + (len(item.forced_T or ()) or item.request.sampling.max_new_tokens)
            for item in waiting
        )
        rows, cache = Rows(capacity, max_new), self._cache
        cache.reserve(capacity, longest)
        while waiting or len(rows):
            # Joining costs a prefill pass, so wait until a quarter of the rows is free, or nothing else is left to do.
            if waiting and (not len(rows) or capacity - len(rows) >= max(1, capacity // 4)):
                self._admit(waiting, rows, cache, prompt_logprobs)
            else:
                self._decode(rows, cache)
            done = self._finished(rows)
            yield from rows.finish(done)
            if done:
                length = int(rows.position_C[: len(rows)].max())
                sources, targets = rows.remove([row for row, _ in done])
                if sources:
                    device = self._policy.device
                    cache.move_rows(torch.tensor(sources, device=device), torch.tensor(targets, device=device), length)

    def _admit(
        self,
        waiting: deque[Work],
        rows: Rows,
        cache: KVCache | TokenHistory,
        prompt_logprobs: dict[str | None, list[float]] | None,
    ) -> None:
        """Moves requests from `waiting` into free rows, runs their prompts once each and samples first tokens."""
        first = len(rows)
        admitted: list[Work] = []
        prompts: dict[tuple[str | None, tuple[int, ...]], int] = {}
        tokens = 0
        while waiting and first + len(admitted) < len(rows.keys_C):
            request = waiting[0].request
            identity = (request.adapter, request.prompt_ids_T)
            if identity not in prompts:
                if prompts and tokens + len(request.prompt_ids_T) > PREFILL_TOKENS:
                    break
                tokens += len(request.prompt_ids_T)
                prompts[identity] = len(prompts)
            admitted.append(waiting.popleft())
        # One forward pass applies adapters to runs of tokens, so prompts of one adapter stand together.
        ordered = sorted(prompts, key=lambda identity: identity[0] or "")
        place = {identity: index for index, identity in enumerate(ordered)}
        prompt_of_row = [place[(item.request.adapter, item.request.prompt_ids_T)] for item in admitted]
        logits_BV = self._prefill(ordered, prompt_of_row, first, cache, prompt_logprobs)
        rows.admit(admitted, [self._version(item.request.adapter) for item in admitted])
        self._sample(logits_BV, rows, slice(first, len(rows)))

    def _prefill(
        self,
        prompts: list[tuple[str | None, tuple[int, ...]]],
        prompt_of_row: list[int],
        first_row: int,
        cache: KVCache | TokenHistory,
        prompt_logprobs: dict[str | None, list[float]] | None,
    ) -> torch.Tensor:
        """Runs unique prompts, fills the cache rows; returns fp32 next-token logits `[rows, V]`."""
        policy = self._policy
        batch = policy.pack([Branch(index, prompt, (0,)) for index, (_, prompt) in enumerate(prompts)])
        lengths = [len(prompt) for _, prompt in prompts]
        starts = np.cumsum([0, *lengths])[:-1].tolist()
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        plan = PackedPlan(batch, policy.kernel, capture=True)
        adapters = [adapter for adapter, _ in prompts]
        with policy.injected.selection.use(_selected(merge_segments(adapters, starts, ends))):
            hidden = policy.sampled_hidden(batch.token_ids_T, batch.position_T, plan)
        index = torch.tensor(prompt_of_row, device=policy.device)
        starts_P, lengths_P = torch.tensor(starts, device=policy.device), torch.tensor(lengths, device=policy.device)
        cache.keep_prompts(first_row, index, starts_P, lengths_P, batch, plan)
        if prompt_logprobs is not None:
            for adapter, start, end in zip(adapters, starts, ends, strict=True):
                targets = batch.token_ids_T[start + 1 : end]
                logprobs, _ = token_logprobs(
                    hidden[start : end - 1], targets, policy.head, vocabulary=policy.vocabulary
                )
                prompt_logprobs[adapter] = logprobs.tolist()
        return policy.head(hidden[batch.target_source_R]).float()[index]

    def _decode(self, rows: Rows, cache: KVCache | TokenHistory) -> None:
        n = len(rows)
        policy, device = self._policy, self._policy.device
        last_B, position_B = (torch.tensor(column[:n], device=device) for column in (rows.last_C, rows.position_C))
        plan = cache.plan(last_B, rows.position_C[:n], self._kernel)
        with policy.injected.selection.use(_selected(rows.segments())):
            hidden = policy.sampled_hidden(last_B, position_B, plan)
        self._sample(policy.head(hidden).float(), rows, slice(0, n))

    def _sample(self, logits_BV: torch.Tensor, rows: Rows, which: slice) -> None:
        generated = rows.generated_C[which]
        device = logits_BV.device
        if rows.work[which.start].forced_T is not None:
            # Scoring never mixes with sampling: `score` runs alone.
            forced = [item.forced_T for item in rows.work[which]]
            tokens = torch.tensor([f[t] for f, t in zip(forced, generated, strict=True) if f], device=device)
            logprobs = torch.log_softmax(logits_BV, -1).gather(-1, tokens[:, None])[:, 0]
        else:
            uniforms_B = torch.from_numpy(uniforms(rows.keys_C[which], generated)).to(device)
            temperature = torch.tensor(rows.temperature_C1[which], device=device) if rows.any_temperature else None
            top_p = torch.tensor(rows.top_p_C1[which], device=device) if rows.any_top_p else None
            tokens, logprobs = draw(logits_BV, uniforms_B, temperature, top_p)
        rows.record(which, tokens, logprobs)

    def _finished(self, rows: Rows) -> list[tuple[int, FinishReason]]:
        done = rows.finished(self._eos)
        if not rows.any_stop:
            return done
        ended = {row for row, _ in done}
        for row, item in enumerate(rows.work):
            if item.request.sampling.stop and row not in ended and self._hits_stop(rows, row):
                done.append((row, "stop"))
        return sorted(done)

    def _hits_stop(self, rows: Rows, row: int) -> bool:
        """Only the text that the newest token can have completed is looked at."""
        stops = rows.work[row].request.sampling.stop
        count = int(rows.generated_C[row])
        window = max(len(stop) for stop in stops) + 8
        text = self._tokenizer.decode(rows.tokens_CT[row, max(0, count - window) : count].tolist())
        return any(stop in text for stop in stops)

    def _completion(self, finished: Finished) -> Completion:
        tokens = tuple(finished.token_ids_T)
        return Completion(
            request_id=finished.request.request_id,
            token_ids_T=tokens,
            logprobs_T=tuple(finished.logprobs_T),
            versions_T=(finished.version,) * len(tokens),
            finish_reason=finished.reason,
            text=answer_text(self._tokenizer, tokens, finished.request.sampling.stop),
        )


def _applied(trace: Sequence[Applied], name: str) -> str:
    """Digest of what slot `name` contributed; the passes of one score apply the same tensors, so each counts once."""
    distinct = {
        (entry.module, *(id(tensor) for tensor in entry.tensors.values())): entry
        for entry in trace
        if entry.slot == name
    }
    return applied_digest(distinct.values())


def _selected(segments: list[tuple[str | None, int, int]]) -> str | list[tuple[str | None, int, int]] | None:
    """A single segment is the whole batch: the layers' fast path."""
    return segments[0][0] if len(segments) == 1 else segments
