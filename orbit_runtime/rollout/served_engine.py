"""The engine over servers: an `Engine` whose slots and passes are those of one or several servers, asked over HTTP.

Belongs here: slots, sleep and readings of all copies at once. Does not belong here: the queue of requests
(`answer_queue`), one server's life (`replica`), its kind (`sglang_api`, `vllm_api`).

Token ids go in, token ids and log-probs come out; text is never tokenised again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from typing import Any

import httpx

from orbit_runtime.errors import GateError
from orbit_runtime.rollout.answer_queue import AnswerQueue
from orbit_runtime.rollout.answers import Answer
from orbit_runtime.rollout.desk import Desk
from orbit_runtime.rollout.news import News
from orbit_runtime.rollout.replica import Replica
from orbit_runtime.rollout.requests import check_held_slot, check_new_slot, check_request
from orbit_runtime.rollout.served import About, Loaded, Sleeping
from orbit_runtime.rollout.served_copy import ServedCopy
from orbit_runtime.types import BASE_VERSION, AdapterFiles, Completion, Request, ServerReading, Tokenizer

END_SECONDS = 5.0
READ_SECONDS = 5.0
"""Each server has less to answer with its metrics; longer waits only who asks while the engine is closed."""


class ServedEngine:
    """Answers prompts with one or several servers. For one thread at a time."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        client: httpx.AsyncClient,
        *,
        desk: Desk,
        max_running_requests: int,
        sleeping: Sequence[Sleeping] = (),
    ) -> None:
        """
        Args:
            client: closed with the engine.
            desk: where its servers find adapters; closed with the engine.
            max_running_requests: completions that one server samples at the same time.
            sleeping: what its servers give back between `sleep` and `wake`.
        """
        self._client = client
        self.desk = desk
        self._sleeping = tuple(sleeping)
        self.loaded: dict[str, Loaded] = {}
        """What every copy must hold; replicas look here."""
        self._retired: set[str] = set()
        self.replicas: tuple[Replica, ...] = ()
        self.explaining = threading.Lock()
        self._handing_over = threading.Lock()
        """A transport carries one adapter at a time; who publishes another meanwhile waits."""
        self.loop = asyncio.new_event_loop()
        """The client's, on a thread of its own."""
        self._thread = threading.Thread(target=self.loop.run_forever, name="rollout-client", daemon=True)
        self._thread.start()
        self._queue = AnswerQueue(self.loop, tokenizer, max_running_requests)

    def attach(self, replicas: Sequence[Replica]) -> list[About]:
        """The servers, which answer by now; once.

        Raises:
            EngineDiedError: one is not there, or runs a plug-in that cannot be asked.
        """
        self.replicas = tuple(replicas)
        self._queue.attach(self.replicas)
        return [self.call(replica.ask(replica.introduce)) for replica in replicas]

    # --- slots ---

    def load_adapter(self, name: str, adapter: AdapterFiles) -> None:
        """Hands the published bytes to every copy under a name that was never used before; one adapter at a time."""
        with self._handing_over:
            self._load_everywhere(name, adapter)

    def _load_everywhere(self, name: str, adapter: AdapterFiles) -> None:
        check_new_slot(name, self.loaded, self._retired)
        self.desk.take(name, adapter)
        self.loaded[name] = loaded = Loaded(adapter, partial(self.desk.files, name))
        # A server that is lost just now gets it as files, once it is back.
        copies = {each.name: (each.restarts, each.about.ranks) for each in self.replicas if each.is_up and each.about}
        try:
            with self.desk.carry(name, copies) as handover:
                self.loaded[name] = replace(loaded, handover=handover)
                self._everywhere(lambda replica: replica.load(name))
        except GateError:
            self._retire(name)
            raise
        finally:
            if name in self.loaded:
                self.loaded[name] = loaded

    def unload_adapter(self, name: str) -> None:
        self.slot(name)
        if self._queue.is_sampling_from(name):
            raise GateError(f"requests under way still sample from {name!r}", fix="abort them, or wait for them")
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

        if self.loop.is_closed():
            return []
        reading = all_of_them()
        try:
            return asyncio.run_coroutine_threadsafe(reading, self.loop).result(READ_SECONDS)
        except (CancelledError, TimeoutError, RuntimeError):
            # The engine is being closed.
            reading.close()
            return []

    def close(self) -> None:
        """Ends the servers that are ours, and the client. Safe to call twice."""
        if self.loop.is_closed():
            return
        try:
            self.call(self._end())
        finally:
            for replica in self.replicas:
                replica.server.stop()
            self.desk.close()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(10)
            self.loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_SECONDS)
        leaving = [asyncio.ensure_future(replica.leave()) for replica in self.replicas]
        if leaving:
            await asyncio.wait(leaving, timeout=END_SECONDS)
        await self._client.aclose()

    def slot(self, name: str) -> Loaded:
        check_held_slot(name, self.loaded)
        return self.loaded[name]

    def _retire(self, name: str) -> None:
        del self.loaded[name]
        self._retired.add(name)
        self._everywhere(lambda replica: replica.unload(name))
        self.desk.drop(name)

    def _everywhere(self, work: Any) -> None:
        """On all copies at once; where some fail, all have ended before the first failure is raised."""

        async def all_of_them() -> None:
            tasks = [replica.ask(partial(work, replica)) for replica in self.replicas]
            for found in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(found, BaseException):
                    raise found

        self.call(all_of_them())

    def _version(self, adapter: str | None) -> int:
        """The proof of the publish ties name and bytes; the plug-in tells by which name each token was sampled."""
        return BASE_VERSION if adapter is None else self.slot(adapter).adapter.version

    # --- completions ---

    def submit(self, requests: Sequence[Request]) -> None:
        under_way = set(self._queue.under_way)
        for request in requests:
            self._version(request.adapter)
            check_request(request, under_way)
            under_way.add(request.request_id)
        self._queue.submit([Answer(each, self._version(each.adapter)) for each in requests])

    def completions(self) -> AsyncGenerator[Completion]:
        return self._queue.completions()

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        self._queue.abort(request_ids)

    @property
    def under_way(self) -> Collection[int]:
        return self._queue.under_way

    def listen(self, tell: Callable[[], None] | None) -> None:
        """`tell` is called whenever pieces have come, of several servers or one."""
        self._queue.listen(tell)

    def news(self) -> News | None:
        return self._queue.news()

    def kinds(self) -> set[str]:
        """Of its servers, as `planner.sampling` names them."""
        abouts = [replica.about for replica in self.replicas if replica.about]
        return {
            "SGLang without plug-in" if about.kind == "SGLang" and about.plugin is None else about.kind
            for about in abouts
        }

    def revive(self) -> None:
        """Brings back those of our own servers that have died, before somebody asks them."""
        for replica in self.replicas:
            if replica.is_up and not replica.server.is_alive():
                self.loop.call_soon_threadsafe(replica.begin_revival)

    def call[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it on the client's own thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()
