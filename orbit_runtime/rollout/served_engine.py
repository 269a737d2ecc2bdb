"""The engine over servers: an `Engine` whose slots and passes are those of one or several servers, asked over HTTP.

Belongs here: who is asked what, and what becomes of the answers. Does not belong here: one server's life (`replica`),
which one (`routing`), its kind (`sglang_api`, `vllm_api`).

Token ids go in, token ids and log-probs come out; text is never tokenised again. The samples of one prompt are one
call, so that they share its prefill; prompts with one short answer each are asked together. A call whose server was
lost is asked again of another; nothing of its first try was handed on, so no rollout counts twice.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from orbit_runtime.errors import EngineDiedError, GateError
from orbit_runtime.rollout.handover import Handover, Transport
from orbit_runtime.rollout.replica import TRIES, Replica
from orbit_runtime.rollout.routing import PrefixRouter
from orbit_runtime.rollout.served import About, Call, Loaded, LostError, Sampled, Sleeping
from orbit_runtime.rollout.served_copy import ServedCopy
from orbit_runtime.rollout.text import answer_text
from orbit_runtime.types import AdapterFiles, Completion, Request, ServerReading, Tokenizer

BASE_VERSION = -1
CALL_TOKENS, MOST_PROMPTS = 512, 16
"""Of one call with several prompts."""
READ_SECONDS = 5.0
"""Each server has less to answer with its metrics; longer waits only who asks while the engine is closed."""


class ServedEngine:
    """Answers prompts with one or several servers. For one thread at a time."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        client: httpx.AsyncClient,
        *,
        folder: Path,
        max_running_requests: int,
        sleeping: Sequence[Sleeping] = (),
        transport: Transport | None = None,
    ) -> None:
        """
        Args:
            client: closed with the engine.
            folder: adapters are handed over below it; both sides see it.
            max_running_requests: completions that one server samples at the same time.
            sleeping: what its servers give back between `sleep` and `wake`.
            transport: how adapters reach its servers; None: as files, and so where it fails.
        """
        self._tokenizer = tokenizer
        self._eos = tuple(tokenizer.eos_ids)
        self._client = client
        self._folder = folder
        self._capacity = max_running_requests
        self._sleeping = tuple(sleeping)
        self._transport = transport
        self.loaded: dict[str, Loaded] = {}
        """What every copy must hold; replicas look here."""
        self._retired: set[str] = set()
        self.replicas: tuple[Replica, ...] = ()
        self._loads: list[int] = []
        self._router = PrefixRouter(0, 1)
        self.explaining = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-client", daemon=True)
        self._thread.start()
        self._changed = asyncio.Condition()

    def attach(self, replicas: Sequence[Replica]) -> list[About]:
        """The servers, which answer by now; once.

        Raises:
            EngineDiedError: one is not there, or runs a plug-in that cannot be asked.
        """
        self.replicas = tuple(replicas)
        self._loads = [0] * len(replicas)
        self._router = PrefixRouter(len(replicas), self._capacity)
        for index, replica in enumerate(replicas):
            replica.on_change = partial(self._came_back, index)
        return [self.call(replica.ask(replica.introduce)) for replica in replicas]

    # --- slots ---

    def load_adapter(self, name: str, adapter: AdapterFiles) -> None:
        """Hands the published bytes to every copy under a name that was never used before."""
        if name in self.loaded or name in self._retired:
            raise GateError(f"adapter name {name!r} was used before", fix="publish every version under a new name")
        loaded = Loaded(adapter, self._folder / name)
        loaded.folder.mkdir(parents=True)
        self.loaded[name] = loaded
        try:
            with self._carry(loaded) as handover:
                self.loaded[name] = replace(loaded, handover=handover)
                self._everywhere(lambda replica: replica.load(name))
        except GateError:
            self._retire(name)
            raise
        finally:
            if name in self.loaded:
                self.loaded[name] = loaded

    def _carry(self, loaded: Loaded) -> AbstractContextManager[Handover | None]:
        """A server that is lost just now gets it as files, once it is back."""
        if self._transport is None:
            return nullcontext()
        copies = {each.name: (each.restarts, each.about.ranks) for each in self.replicas if each.is_up and each.about}
        return self._transport.carry(loaded.adapter, loaded.ticket, copies)

    def unload_adapter(self, name: str) -> None:
        self.slot(name)
        self._retire(name)

    def adapters(self) -> tuple[str, ...]:
        return tuple(self.loaded)

    def copies(self) -> tuple[ServedCopy, ...]:
        return tuple(ServedCopy(self, replica) for replica in self.replicas)

    def sleep(self) -> None:
        if self._sleeping:
            self._everywhere(lambda replica: replica.sleep(self._sleeping))

    def wake(self) -> None:
        if self._sleeping:
            self._everywhere(lambda replica: replica.wake(self._sleeping))

    def read_servers(self) -> list[ServerReading]:
        async def all_of_them() -> list[ServerReading]:
            return list(await asyncio.gather(*(replica.read() for replica in self.replicas)))

        if self._loop.is_closed():
            return []
        reading = all_of_them()
        try:
            return asyncio.run_coroutine_threadsafe(reading, self._loop).result(READ_SECONDS)
        except (CancelledError, TimeoutError, RuntimeError):
            # The engine is being closed.
            reading.close()
            return []

    def close(self) -> None:
        """Ends the servers that are ours, and the client. Safe to call twice."""
        if self._loop.is_closed():
            return
        try:
            self.call(self._end())
        finally:
            for replica in self.replicas:
                replica.server.stop()
            if self._transport is not None:
                self._transport.close()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    async def _end(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await self._client.aclose()

    def slot(self, name: str) -> Loaded:
        if name not in self.loaded:
            raise GateError(f"no adapter {name!r} in the engine; it holds {', '.join(self.loaded) or 'none'}")
        return self.loaded[name]

    def _retire(self, name: str) -> None:
        """Its files go too: a server that loads a name again by itself finds nothing."""
        loaded = self.loaded.pop(name)
        self._retired.add(name)
        self._everywhere(lambda replica: replica.unload(name))
        shutil.rmtree(loaded.folder)

    def _everywhere(self, work: Any) -> None:
        """On all copies at once; where some fail, all have ended before the first failure is raised."""

        async def all_of_them() -> None:
            tasks = [replica.ask(partial(work, replica)) for replica in self.replicas]
            for found in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(found, BaseException):
                    raise found

        self.call(all_of_them())

    def _version(self, adapter: str | None) -> int:
        """A server does not say which version sampled a token; the proof of the publish ties name and bytes."""
        return BASE_VERSION if adapter is None else self.slot(adapter).adapter.version

    # --- passes ---

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yields completions as their prompts' calls end.

        Raises:
            GateError: a request names an adapter that is not loaded, or an answer does not fit its request.
            EngineDiedError: servers died again and again.
        """
        for request in requests:
            self._version(request.adapter)
        # Of several servers each prompt goes to the one that knows its beginning.
        together = len(self.replicas) == 1 and self.replicas[0].api.takes_prompts
        calls = _calls(requests, self._capacity, CALL_TOKENS if together else 0)
        pending: set[Future[list[Completion]]] = {
            asyncio.run_coroutine_threadsafe(self._generate(call), self._loop) for call in calls
        }
        try:
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield from future.result()
        finally:
            for future in pending:
                future.cancel()

    async def _generate(self, call: Call) -> list[Completion]:
        for attempt in range(TRIES):
            index = await self._take(call)
            replica = self.replicas[index]
            try:
                found = await replica.attempt(partial(replica.api.generate, call, self._eos), needs=call.first.adapter)
            except LostError as error:
                if attempt + 1 == TRIES:
                    raise EngineDiedError(
                        f"the request was lost {TRIES} times, at last with {replica.name}: {error}",
                        fix=replica.server.describe(),
                    ) from None
            else:
                return self._completions(call, found)
            finally:
                await self._give_back(index, call)
        raise AssertionError("unreachable")

    async def _take(self, call: Call) -> int:
        """Waits for a copy that lives and has room. A server that did not come back ends the run."""
        first = call.first
        async with self._changed:
            while True:
                for replica in self.replicas:
                    if replica.failure is not None:
                        raise replica.failure
                chosen = self._router.choose(
                    first.adapter,
                    first.prompt_ids_T,
                    len(call.requests),
                    loads=self._loads,
                    alive=[replica.is_up for replica in self.replicas],
                )
                if chosen is not None:
                    self._loads[chosen] += len(call.requests)
                    return chosen
                await self._changed.wait()

    async def _give_back(self, index: int, call: Call) -> None:
        self._loads[index] -= len(call.requests)
        async with self._changed:
            self._changed.notify_all()

    async def _came_back(self, index: int) -> None:
        self._router.forget(index)
        async with self._changed:
            self._changed.notify_all()

    def _completions(self, call: Call, found: Sequence[Sampled]) -> list[Completion]:
        if len(found) != len(call.requests):
            raise GateError(
                f"asked for {len(call.requests)} samples, the engine answered {len(found)}", where="rollout"
            )
        return [
            Completion(
                request_id=request.request_id,
                token_ids_T=sampled.token_ids_T,
                logprobs_T=sampled.logprobs_T,
                versions_T=(self._version(request.adapter),) * len(sampled.token_ids_T),
                finish_reason=sampled.finish_reason,
                text=answer_text(self._tokenizer, sampled.token_ids_T, request.sampling.stop),
                routed_experts=sampled.routed_experts,
            )
            for request, sampled in zip(call.requests, found, strict=True)
        ]

    def call[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it on the client's own thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _calls(requests: Sequence[Request], capacity: int, tokens: int) -> list[Call]:
    """One per prompt; a prompt with more samples than a server runs at the same time is asked in several.

    Prompts with one sample each are asked together as long as their answers stay below `tokens`: each that arrives
    alone would be a prefill of its own. Long answers are not: a call ends with its longest, the others' places empty.
    """
    grouped: dict[Any, list[Request]] = {}
    for request in requests:
        grouped.setdefault((request.sampling, request.adapter, request.prompt_ids_T), []).append(request)
    calls, single = [], {}
    for (sampling, adapter, _), group in grouped.items():
        if len(group) == 1:
            single.setdefault((sampling, adapter), []).append(group[0])
            continue
        calls += [Call(tuple(group[start : start + capacity])) for start in range(0, len(group), capacity)]
    for (sampling, _), alone in single.items():
        size = max(1, min(tokens // sampling.max_new_tokens, MOST_PROMPTS, capacity))
        calls += [Call(tuple(alone[start : start + size])) for start in range(0, len(alone), size)]
    return calls
