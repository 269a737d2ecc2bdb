"""The torch engine: batched generation on the base it shares with the trainer, under named adapter slots.

Belongs here: the queue of requests, scoring by the same passes, slots by name, and replacing the base while requests
in flight end on the one they began with.
Does not belong here: prefill and decode steps (`decoding`), the contents of a slot (`adapters.state`), loading and
proving a base (`serve`).
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from orbit_runtime.adapters.files import CONFIG_FILE
from orbit_runtime.adapters.layer import AppliedTensors
from orbit_runtime.adapters.state import (
    applied_digest,
    explain_difference,
    load_slot,
    remove_slot,
    slot_digest,
    slot_files,
)
from orbit_runtime.data.routing import pack_experts
from orbit_runtime.errors import GateError
from orbit_runtime.policy.model import Policy
from orbit_runtime.rollout.decoding import DecodingBatch, ScoreReadings
from orbit_runtime.rollout.requests import answer_text, check_held_slot, check_new_slot, check_request
from orbit_runtime.rollout.rows import ActiveRequest, FinishedRequest
from orbit_runtime.rollout.streaming import Alternatives, TokenDeltas
from orbit_runtime.types import (
    BASE_VERSION,
    FLOATS,
    TOKENS,
    AdapterFiles,
    Completion,
    FinishReason,
    Request,
    RoutedExperts,
    Sampling,
    Scored,
    ServerReading,
    Tokenizer,
)
from orbit_runtime.workers.child.heartbeat import device_work

SCORED_BY_DECODING = 2
"""Tokens at the end of a scored sequence that go through decode steps, so that a score exercises both passes."""


@dataclass(frozen=True)
class Slot:
    version: int
    digest: str
    config: bytes
    """`adapter_config.json` as loaded."""


class TorchEngine:
    """An `Engine` in this process. One thread takes completions; another may load, prove and unload meanwhile.

    Passes of the trainer and of the engine take turns (`Selection.turn`): they share one device, and the layers of one
    model apply one selection at a time. A decode step waits for the current micro-batch, and the next micro-batch for
    that step.
    """

    name = "the engine"
    reads_back = True

    def __init__(
        self,
        policy: Policy,
        tokenizer: Tokenizer,
        *,
        max_running_requests: int,
        notes_experts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            notes_experts: whether completions report the experts of their tokens.
        """
        self._policy = policy
        self.device = policy.device
        self._turn = policy.injected.selection.turn
        self._tokenizer = tokenizer
        self._clock = clock
        notes = policy.routing if notes_experts else None
        self._decoding = DecodingBatch(policy, tokenizer, self._version, max_running_requests, notes=notes)
        self._scoring = DecodingBatch(policy, tokenizer, self._version, max_running_requests)
        self.under_way: set[int] = set()
        """Ids of requests whose completions are not handed out yet."""
        self._due: dict[int, float] = {}
        """Deadlines, by request id."""
        self._ended: deque[FinishedRequest] = deque()
        """Finished requests that are not handed out yet."""
        self._slots: dict[str, Slot] = {}
        self._retired: set[str] = set()
        self._tell: Callable[[], None] | None = None

    # --- slots ---

    def load_adapter(self, name: str, adapter: AdapterFiles) -> None:
        """Fills slot `name` from the published bytes; a name that is loaded or retired is refused."""
        check_new_slot(name, self._slots, self._retired)
        with self._turn:
            load_slot(self._policy.injected.layers, name, adapter.files)
        self._slots[name] = Slot(adapter.version, adapter.digest, bytes(adapter.files[CONFIG_FILE]))

    def unload_adapter(self, name: str) -> None:
        self._slot(name)
        with self._turn:
            if any(item.request.adapter == name for item in self._decoding.under_way()):
                raise GateError(f"requests under way still sample from {name!r}", fix="abort them, or wait for them")
            del self._slots[name]
            self._retired.add(name)
            remove_slot(self._policy.injected.layers, name)

    def adopt(self, name: str, version: int) -> None:
        """Samples from a slot that the trainer filled, until `release`; nothing was published, so there is no proof."""
        self._slots[name] = Slot(version, "", b"")

    def release(self, name: str) -> None:
        """Forgets the slot, which its owner keeps."""
        del self._slots[name]

    def adapter_digest(self, name: str) -> str:
        return slot_digest(self._policy.injected.layers, name, self._slot(name).config)

    def explain_slot(self, name: str, published: AdapterFiles) -> str:
        held = slot_files(self._policy.injected.layers, name, self._slot(name).config)
        return explain_difference(published.files, held)

    def copies(self) -> tuple[TorchEngine, ...]:
        return (self,)

    def sleep(self) -> None:
        """Does nothing: the engine computes with the trainer's own weights, and keeps no cache between calls."""

    def wake(self) -> None: ...

    def read_servers(self) -> tuple[ServerReading, ...]:
        return ()

    def adapters(self) -> tuple[str, ...]:
        return tuple(self._slots)

    def close(self) -> None:
        """Ends requests under way too: an error may be the reason, and must not be hidden by a second one."""
        self.abort()
        for name in self.adapters():
            self.unload_adapter(name)

    def _slot(self, name: str) -> Slot:
        check_held_slot(name, self._slots)
        return self._slots[name]

    def _version(self, adapter: str | None) -> int:
        return BASE_VERSION if adapter is None else self._slot(adapter).version

    # --- generation ---

    def submit(self, requests: Sequence[Request]) -> None:
        under_way = self.under_way.copy()
        for request in requests:
            self._version(request.adapter)
            check_request(request, under_way)
            under_way.add(request.request_id)
        self.under_way, now = under_way, self._clock()
        self._due |= {each.request_id: now + each.deadline_seconds for each in requests if each.deadline_seconds}
        with self._turn:
            self._decoding.add([ActiveRequest(request) for request in requests])

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        self._end({*self.under_way} if request_ids is None else {*request_ids}, "abort")

    def listen(self, tell: Callable[[], None] | None) -> None:
        """Makes the engine call `tell` after each step of the batch."""
        self._tell = tell

    def take_deltas(self) -> TokenDeltas | None:
        return self._decoding.take_deltas()

    async def completions(self) -> AsyncGenerator[Completion]:
        """Runs one batch step at a time; between two steps, other tasks may submit, abort or do other work."""
        while True:
            # Tasks that just received completions submit their next requests before the batch goes on.
            await asyncio.sleep(0)
            if self._tell is not None:
                # Socket input that arrived meanwhile is handled after the tasks that the first turn woke.
                await asyncio.sleep(0)
            self._step()
            if self._tell is not None:
                self._tell()
            if not self._ended and not len(self._decoding):
                return
            while self._ended:
                yield self._completion(self._ended.popleft())

    def advance(self) -> list[Completion]:
        """One turn of `completions` for callers without an event loop; returns what it would have yielded."""
        self._step()
        return [self._completion(self._ended.popleft()) for _ in range(len(self._ended))]

    def _step(self) -> None:
        """Runs a batch step, unless finished requests are waiting to be handed out."""
        self._end_late()
        if not self._ended and len(self._decoding):
            with self._turn, device_work("a step of sampling", self._policy.device.type):
                self._ended.extend(self._decoding.step())

    def _end_late(self) -> None:
        if not self._due:
            return
        now = self._clock()
        late = {request_id for request_id, due in self._due.items() if due <= now}
        if late:
            self._end(late, "deadline")

    def _end(self, request_ids: Collection[int], reason: FinishReason) -> None:
        with self._turn:
            self._ended.extend(self._decoding.remove(request_ids, reason))

    def score(
        self,
        token_ids_T: Sequence[int],
        adapters: Sequence[str | None],
        prefix_length: int | None = None,
        standing: Sequence[str] = (),
    ) -> list[Scored]:
        """Teacher-forced: a prefill of all but the last few tokens, then decode steps, with every adapter in one batch.

        Calls share no keys and values here, so `prefix_length` has no effect. Digests are read when asked for.
        """
        return self.score_together([token_ids_T], adapters)[0]

    def score_together(self, sequences: Sequence[Sequence[int]], adapters: Sequence[str | None]) -> list[list[Scored]]:
        """`score` of several sequences in one batch."""
        work: list[ActiveRequest] = []
        for tokens in sequences:
            tail = min(SCORED_BY_DECODING, len(tokens) - 1)
            prompt, forced = tuple(tokens[:-tail]), tuple(tokens[-tail:])
            for name in adapters:
                work.append(ActiveRequest(Request(len(work), 0, prompt, Sampling(), name), forced))
        told = ScoreReadings()
        tails: dict[int, Sequence[float]] = {}
        # A batch of its own, because requests may be in flight.
        with self._policy.traced() as trace:
            self._scoring.add(work)
            try:
                while len(self._scoring):
                    with device_work("a step of scoring", self._policy.device.type):
                        ended = self._scoring.step(told)
                    for finished in ended:
                        tails[finished.request.request_id] = finished.logprobs_T
            finally:
                self._scoring.remove(range(len(work)), "abort")
        applied = {name: _applied(trace, name) if name else None for name in adapters}
        scored = []
        for item in work:
            index, key = item.request.request_id, (item.request.adapter, item.prefill_T)
            top_T = (-1, *told.top[key], *told.forced_top[index])
            scored.append(Scored((0.0, *told.logprobs[key], *tails[index]), applied[item.request.adapter], top_T=top_T))
        return [scored[first : first + len(adapters)] for first in range(0, len(scored), len(adapters))]

    def _completion(self, finished: FinishedRequest) -> Completion:
        self.under_way.discard(finished.request.request_id)
        self._due.pop(finished.request.request_id, None)
        return Completion(
            request_id=finished.request.request_id,
            token_ids_T=finished.token_ids_T,
            logprobs_T=finished.logprobs_T,
            versions_T=finished.versions_T,
            finish_reason=finished.reason,
            text=answer_text(self._tokenizer, finished.token_ids_T, finished.request.sampling),
            routed_experts=_experts(finished),
            alternatives=finished.alternatives,
        )


def _experts(finished: FinishedRequest) -> RoutedExperts | None:
    if finished.routed:
        return pack_experts(np.concatenate(finished.routed))
    so_far = finished.request.so_far
    return so_far.routed_experts if so_far else None


def _applied(trace: Sequence[AppliedTensors], name: str) -> str:
    """Digest of what slot `name` contributed; the passes of one score apply the same tensors, so each counts once."""
    distinct = {
        (entry.module, *(id(tensor) for tensor in entry.tensors.values())): entry
        for entry in trace
        if entry.slot == name
    }
    return applied_digest(distinct.values())


class ReplaceableEngine:
    """A `StreamingEngine`. `replace` may be called from any thread, as long as no `submit` runs meanwhile."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._before: TorchEngine | None = None
        """The previous one, until its last request has ended."""
        self._lock = threading.Lock()
        """Held while either of the two changes."""
        self._tell: Callable[[], None] | None = None

    def replace(self, engine: TorchEngine) -> None:
        """Sends all later requests to this engine. Slots of the previous one are not carried over.

        Call `check_replaceable` before, and `let_go` afterwards.
        """
        with self._lock:
            assert self._before is None, "three engines would be held"
            self._before, self._engine = self._engine, engine

    def check_replaceable(self) -> None:
        """Raises GateError if requests of an engine that was replaced before are still in flight."""
        self.let_go()
        before = self._before
        if before is not None:
            raise GateError(
                f"{len(before.under_way)} completions that began under the weights before these have not ended, and "
                "a third copy of the model would be needed",
                fix="send it again once they have ended",
            )

    def let_go(self) -> None:
        """Frees the previous engine's weights if its last request has ended. Safe to call twice."""
        with self._lock:
            if self._before is None or self._before.under_way:
                return
            device = self._before.device
            self._before = None
        # The engine's parts refer to each other, so only a collection frees its weights.
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def _engines(self) -> tuple[TorchEngine, ...]:
        with self._lock:
            return (self._engine,) if self._before is None else (self._before, self._engine)

    # --- generation ---

    def submit(self, requests: Sequence[Request]) -> None:
        self._engine.submit(requests)

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        for engine in self._engines():
            engine.abort(request_ids)

    @property
    def under_way(self) -> Collection[int]:
        engines = self._engines()
        return engines[0].under_way if len(engines) == 1 else {each for engine in engines for each in engine.under_way}

    def listen(self, tell: Callable[[], None] | None) -> None:
        """Makes the engines call `tell` after each step of their batches."""
        self._tell = tell

    def take_deltas(self) -> TokenDeltas | None:
        found = [deltas for engine in self._engines() if (deltas := engine.take_deltas()) is not None]
        return found[0] if len(found) == 1 else _joined(found)

    async def completions(self) -> AsyncGenerator[Completion]:
        """Like `TorchEngine.completions`; after a replacement, both batches advance in turn."""
        while True:
            await asyncio.sleep(0)
            if self._tell is not None:
                await asyncio.sleep(0)
            done = [completion for engine in self._engines() for completion in engine.advance()]
            if self._tell is not None:
                self._tell()
            if self._before is not None:
                self.let_go()
            if not done and not self.under_way:
                return
            for completion in done:
                yield completion

    # --- slots, of the current engine ---

    def load_adapter(self, name: str, adapter: AdapterFiles) -> None:
        self._engine.load_adapter(name, adapter)

    def unload_adapter(self, name: str) -> None:
        self._engine.unload_adapter(name)

    def adapters(self) -> tuple[str, ...]:
        return self._engine.adapters()

    def copies(self) -> tuple[TorchEngine, ...]:
        return self._engine.copies()

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def read_servers(self) -> tuple[ServerReading, ...]:
        return ()

    def close(self) -> None:
        for engine in self._engines():
            engine.close()


def _joined(found: Sequence[TokenDeltas]) -> TokenDeltas | None:
    """News of several engines, whose requests differ, as one record."""
    if not found:
        return None
    ids, counts = array(found[0].request_ids_D.typecode), array(found[0].counts_D.typecode)
    tokens: array[int] = array(TOKENS)
    logprobs: array[float] = array(FLOATS)
    alternatives: dict[int, Alternatives] = {}
    for deltas in found:
        ids += deltas.request_ids_D
        counts += deltas.counts_D
        tokens += deltas.token_ids_T
        logprobs += deltas.logprobs_T
        alternatives |= deltas.alternatives
    return TokenDeltas(ids, counts, tokens, logprobs, alternatives)
