"""The request queue of an engine over servers: which server gets which request, and what happens when one is lost.

Belongs here: from requests to completions over several servers, and the tokens received for each, checked as they
arrive. Does not belong here: one server's life cycle (`replica`), the format of its events (`sglang_api`, `vllm_api`).

The samples of one prompt form one call, so they share its prefill; prompts with one short completion each are sent
together. If a server is lost, its completions continue on another from the tokens received so far: no token is sampled
twice, none is lost, and neither are hours of sampling.

A prompt goes to the server that has most of it in its cache, unless that one is too busy. It is cut into blocks; a
block's hash covers everything before it and the adapter, as the keys of KV caches do. Loads are bounded as in
consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018): no server gets more than `SLACK` times
the mean, so a prefix that all prompts share does not send them all to one server.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING
from uuid import uuid4

from orbit_runtime.errors import EngineDiedError, GateError
from orbit_runtime.rollout.replica import TRIES, Replica
from orbit_runtime.rollout.requests import answer_text
from orbit_runtime.rollout.server_types import Ask, Call, LostError, TokenPiece
from orbit_runtime.rollout.streaming import Alternatives, TokenDeltas, part_of, with_more
from orbit_runtime.types import FLOATS, TOKENS, Completion, FinishReason, Request, Tokenizer

if TYPE_CHECKING:
    from orbit_runtime.rollout.replica import Replica


SLACK = 1.25
BLOCK_TOKENS = 16
KEPT_BLOCKS = 1 << 16
"""Per server: 1M tokens, about what a cache holds."""


class PrefixRouter:
    """Remembers which prefixes went where. The same calls in the same order get the same results."""

    def __init__(self, count: int, capacity: int, *, kept_blocks: int = KEPT_BLOCKS) -> None:
        """Args: capacity: completions that one server samples at a time."""
        self._seen: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(count)]
        self._capacity = capacity
        self._kept = kept_blocks

    def choose(
        self, adapter: str | None, tokens: Sequence[int], cost: int, *, loads: Sequence[int], alive: Sequence[bool]
    ) -> int | None:
        """Index of the server for `cost` completions of this prompt; None if all live servers are busy.

        Args:
            loads: completions that each server samples now.
        """
        living = [index for index, is_alive in enumerate(alive) if is_alive]
        if not living:
            return None
        mean = (sum(loads[index] for index in living) + cost) / len(living)
        least = min(loads[index] for index in living)
        bound = min(self._capacity, max(least + cost, math.ceil(SLACK * mean)))
        free = [index for index in living if loads[index] == 0 or loads[index] + cost <= bound]
        if not free:
            return None
        blocks = list(_blocks(adapter, tokens))
        chosen = min(free, key=lambda index: (-self._matched(index, blocks), loads[index], index))
        self._remember(chosen, blocks)
        return chosen

    def forget(self, index: int) -> None:
        """Forgets a restarted server's prefixes, as its cache is empty."""
        self._seen[index].clear()

    def _matched(self, index: int, blocks: Sequence[int]) -> int:
        seen = self._seen[index]
        return next((count for count, block in enumerate(blocks) if block not in seen), len(blocks))

    def _remember(self, index: int, blocks: Sequence[int]) -> None:
        seen = self._seen[index]
        for block in blocks:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > self._kept:
            seen.popitem(last=False)


def _blocks(adapter: str | None, tokens: Sequence[int]) -> Iterator[int]:
    """Hashes of the prefixes that end at block boundaries, and of the whole prompt."""
    before = hash(adapter or "")
    for start in range(0, len(tokens), BLOCK_TOKENS):
        before = hash((before, *tokens[start : start + BLOCK_TOKENS]))
        yield before


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

    def add(self, piece: TokenPiece) -> None:
        """Adds tokens.

        Raises:
            GateError: a token was skipped or repeated, there are more than requested, or a finished
                completion has none.
        """
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


CALL_TOKENS, MOST_PROMPTS = 512, 16
"""Limits of one call with several prompts."""
FIRST_AGAIN_SECONDS, AGAIN_SECONDS = 0.05, 1.0
"""Seconds before an abort is repeated, doubled each time: a server forgets one for a request that it has not begun."""


@dataclass(frozen=True)
class FailedRequests:
    """Requests that will never be completed, and why."""

    request_ids: tuple[int, ...]
    error: Exception


class AnswerQueue:
    """Requests in flight at an engine's servers."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tokenizer: Tokenizer, capacity: int) -> None:
        """
        Args:
            loop: the client's event loop, already running.
            capacity: completions that one server samples at a time.
        """
        self.under_way: dict[int, str | None] = {}
        """Adapter by request id. Belongs to the caller's thread."""
        self._ended: deque[Completion | FailedRequests] = deque()
        self._pieces: deque[tuple[int, array[int], array[float], Alternatives | None]] = deque()
        """Pieces of streamed requests that were not reported yet."""
        self._tell: Callable[[], None] | None = None
        self._wake: Callable[[], object] | None = None
        """Wakes the consumer that waits for completions."""
        self._loop = loop
        self._tokenizer = tokenizer
        self._eos = tuple(tokenizer.eos_ids)
        self._capacity = capacity
        self._replicas: tuple[Replica, ...] = ()
        self._answers: dict[int, Answer] = {}
        """This and all fields below belong to the client's thread."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._loads: list[int] = []
        self._router = PrefixRouter(0, 1)
        self._changed = asyncio.Condition()

    def attach(self, replicas: Sequence[Replica]) -> None:
        """Sets the servers; call it once."""
        self._replicas = tuple(replicas)
        self._loads = [0] * len(replicas)
        self._router = PrefixRouter(len(replicas), self._capacity)
        for index, replica in enumerate(replicas):
            replica.on_change = partial(self._came_back, index)

    # --- the caller's thread ---

    def submit(self, answers: Sequence[Answer]) -> None:
        self.under_way |= {answer.request.request_id: answer.request.adapter for answer in answers}
        self._loop.call_soon_threadsafe(self._start, answers)

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        ids = [*self.under_way] if request_ids is None else [*request_ids]
        if ids and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end_early, ids, "abort")

    def listen(self, tell: Callable[[], None] | None) -> None:
        self._tell = tell

    def take_deltas(self) -> TokenDeltas | None:
        ids, counts = array("q"), array(TOKENS)
        tokens: array[int] = array(TOKENS)
        logprobs: array[float] = array(FLOATS)
        alternatives: dict[int, Alternatives] = {}
        while self._pieces:
            request_id, new_tokens, new_logprobs, top = self._pieces.popleft()
            ids.append(request_id)
            counts.append(len(new_tokens))
            tokens += new_tokens
            logprobs += new_logprobs
            if top is not None:
                alternatives[request_id] = with_more(alternatives.get(request_id), top)
        return TokenDeltas(ids, counts, tokens, logprobs, alternatives) if ids else None

    def is_sampling_from(self, adapter: str) -> bool:
        return adapter in self.under_way.values()

    async def completions(self) -> AsyncGenerator[Completion]:
        arrived = asyncio.Event()
        self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, arrived.set)
        try:
            while True:
                # Consumers that just received a completion may first submit their next request.
                await asyncio.sleep(0)
                arrived.clear()
                if self._pieces and self._tell is not None:
                    self._tell()
                while self._ended:
                    ended = self._ended.popleft()
                    if isinstance(ended, FailedRequests):
                        for request_id in ended.request_ids:
                            del self.under_way[request_id]
                        raise ended.error
                    del self.under_way[ended.request_id]
                    yield ended
                if not self.under_way:
                    return
                if not self._ended and not self._pieces:
                    await arrived.wait()
        finally:
            self._wake = None

    # --- the client's thread ---

    def _start(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            request = answer.request
            self._answers[request.request_id] = answer
            if request.deadline_seconds is not None:
                answer.timer = self._loop.call_later(
                    request.deadline_seconds, self._end_early, [request.request_id], "deadline"
                )
        # With several servers, each prompt goes to the one that has its beginning in the cache.
        together = len(self._replicas) == 1 and self._replicas[0].api.takes_prompts
        for group in group_answers(answers, self._capacity, CALL_TOKENS if together else 0):
            self._spawn(group)

    def _spawn(self, group: list[Answer]) -> None:
        task = self._loop.create_task(self._run(group))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end_early(self, request_ids: Sequence[int], reason: FinishReason) -> None:
        for request_id in request_ids:
            answer = self._answers.get(request_id)
            if answer is None or answer.wanted is not None:
                continue
            answer.wanted = reason
            if answer.at is None or not answer.at.api.ends_one:
                self._finish(answer)
        # A task that waits for a server may have nothing left to ask for.
        self._loop.create_task(self._notify())

    def _finish(self, answer: Answer) -> None:
        """Hands the completion over, with its own finish reason or the requested one."""
        answer.finish_reason = answer.finish_reason or answer.wanted
        self._forget(answer)
        self._hand_over(answer.completion(self._tokenizer))

    def _forget(self, answer: Answer) -> None:
        del self._answers[answer.request.request_id]
        if answer.timer is not None:
            answer.timer.cancel()

    def _hand_over(self, ended: Completion | FailedRequests) -> None:
        self._ended.append(ended)
        self._notice()

    def _notice(self) -> None:
        wake = self._wake
        if wake is not None:
            # If the consumer's event loop has ended, the next consumer finds the completion.
            with suppress(RuntimeError):
                wake()

    async def _run(self, group: list[Answer]) -> None:
        """Runs until each completion has ended; errors are raised where completions are taken."""
        losses = 0
        try:
            while left := _unended(group):
                index = await self._take(left)
                if index is None:
                    continue
                left = _unended(left)
                before = sum(len(answer.tokens) for answer in left)
                try:
                    await self._stream(self._replicas[index], left)
                except LostError as error:
                    is_further = sum(len(answer.tokens) for answer in left) > before
                    losses = 1 if is_further else losses + 1
                    if losses == TRIES:
                        raise self._lost(self._replicas[index], error) from None
                    for answer in _unended(left):
                        if answer.wanted is not None:
                            self._finish(answer)
                        else:
                            answer.ask_again()
                    if is_further:
                        # Their inputs now differ, so each is sent on its own.
                        for answer in _unended(left):
                            self._spawn([answer])
                        return
                finally:
                    await self._give_back(index, len(left))
        except Exception as error:
            for answer in _unended(group):
                self._forget(answer)
            self._hand_over(FailedRequests(tuple(answer.request.request_id for answer in _unended(group)), error))

    @staticmethod
    def _lost(replica: Replica, error: LostError) -> EngineDiedError:
        return EngineDiedError(
            f"the request was lost {TRIES} times, at last with {replica.name}: {error}", fix=replica.server.describe()
        )

    async def _stream(self, replica: Replica, answers: list[Answer]) -> None:
        """Raises LostError if the stream ends before its completions do."""
        for answer in answers:
            answer.at = replica
        ending = self._loop.create_task(self._end_asked(replica, answers))
        call = Call(tuple(answer.ask for answer in answers))
        try:
            async with aclosing(replica.stream(call, self._eos)) as pieces:
                async for piece in pieces:
                    self._add(answers, piece)
                    if not _unended(answers):
                        return
            raise LostError("its stream ended before its completions did")
        finally:
            ending.cancel()
            for answer in answers:
                answer.at = None

    def _add(self, answers: Sequence[Answer], piece: TokenPiece) -> None:
        if not 0 <= piece.index < len(answers):
            raise GateError(f"asked for {len(answers)} completions, the engine answered one more", where="rollout")
        answer = answers[piece.index]
        if answer.finish_reason is not None:
            # A completion given up here continues at the server until its whole call ends.
            return
        answer.add(piece)
        if answer.finish_reason is not None:
            self._finish(answer)
        elif self._tell is not None and answer.request.is_streamed and (fresh := answer.take_fresh()):
            self._pieces.append((answer.request.request_id, *fresh))
            self._notice()

    async def _end_asked(self, replica: Replica, answers: Sequence[Answer]) -> None:
        """Tells the server which completions to end early, and repeats it until they have ended."""
        while True:
            async with self._changed:
                await self._changed.wait()
            pause = FIRST_AGAIN_SECONDS
            while rids := [answer.ask.rid for answer in _unended(answers) if answer.wanted is not None]:
                with suppress(LostError, GateError):
                    await replica.api.abort(rids)
                await asyncio.sleep(pause)
                pause = min(2 * pause, AGAIN_SECONDS)

    async def _take(self, answers: Sequence[Answer]) -> int | None:
        """Waits for a live replica with room; None if all of the completions ended meanwhile.

        Raises:
            OrbitError: a server could not be brought back, which ends the run.
        """
        async with self._changed:
            while left := _unended(answers):
                for replica in self._replicas:
                    if replica.failure is not None:
                        raise replica.failure
                first = left[0].request
                chosen = self._router.choose(
                    first.adapter,
                    first.prompt_ids_T,
                    len(left),
                    loads=self._loads,
                    alive=[replica.is_up for replica in self._replicas],
                )
                if chosen is not None:
                    self._loads[chosen] += len(left)
                    return chosen
                await self._changed.wait()
        return None

    async def _give_back(self, index: int, count: int) -> None:
        self._loads[index] -= count
        await self._notify()

    async def _came_back(self, index: int) -> None:
        self._router.forget(index)
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _unended(answers: Sequence[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.finish_reason is None]


def group_answers(answers: Sequence[Answer], capacity: int, tokens: int) -> list[list[Answer]]:
    """One group for each prompt; a prompt with more samples than a server runs at a time is split into several.

    Prompts with one sample each are sent together as long as their completions stay below `tokens`, because each alone
    would need its own prefill. Long ones are not: a call ends with its longest, and the others' places stay empty.
    """
    grouped: dict[object, list[Answer]] = {}
    for answer in answers:
        request = answer.request
        grouped.setdefault((request.sampling, request.adapter, answer.ask.input_T), []).append(answer)
    groups: list[list[Answer]] = []
    single: dict[object, list[Answer]] = {}
    for group in grouped.values():
        if len(group) == 1:
            request = group[0].request
            single.setdefault((request.sampling, request.adapter), []).append(group[0])
            continue
        groups += [group[start : start + capacity] for start in range(0, len(group), capacity)]
    for alone in single.values():
        size = max(1, min(tokens // alone[0].request.sampling.max_new_tokens, MOST_PROMPTS, capacity))
        groups += [alone[start : start + size] for start in range(0, len(alone), size)]
    return groups
