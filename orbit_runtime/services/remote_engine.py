"""The engine in another process, as an `Engine` for the loop; torch-free.

It is driven step by step, one call per step, so a request made between two batch steps falls between the same two steps
as in one process: the same batches, hence the same bits. The calls since it last had nothing to sample are kept; a
restarted inference process gets them again, with the adapters, and continues in mid-step. Repeated results are dropped.
Belongs here: this. Does not belong here: the connection (`connection`), the server (`calls`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from orbit_runtime.rollout.requests import check_held_slot, check_new_slot, check_request
from orbit_runtime.services.connection import Connection
from orbit_runtime.services.shared_store import travelling
from orbit_runtime.types import AdapterFiles, Completion, Request, Scored, ServerReading


@dataclass
class _Told:
    operations: list[tuple[str, list[Any]]] = field(default_factory=list)
    steps: int = 0


class RemoteEngine:
    """An `Engine`, and its only copy."""

    name = "the engine"
    reads_back = True

    def __init__(self, connection: Connection, share: Callable[[Callable[..., Any]], bool]) -> None:
        """Args: share: tests whether its process sees the run's store; see `shared_store`."""
        self._connection = connection
        self._share = share
        self._is_shared = share(connection.call)
        self._turn = connection.turn
        self._adapters: dict[str, AdapterFiles] = {}
        self._adopted: dict[str, int] = {}
        self._retired: set[str] = set()
        self._new: list[tuple[str, list[Any]]] = []
        """Operations not sent yet."""
        self._told: list[_Told] = []
        """Operations sent since nothing was in flight."""
        self._under_way: dict[int, str | None] = {}
        """Adapter by request id, until the completion is handed out."""
        self._ended: deque[Completion] = deque()
        connection.on_restart = self._tell_again

    # --- slots ---

    def load_adapter(self, name: str, adapter: AdapterFiles) -> None:
        check_new_slot(name, self._adapters, self._retired)
        with self._turn:
            self._connection.call("load_adapter", *self._named(name, adapter))
            self._adapters[name] = adapter

    def unload_adapter(self, name: str) -> None:
        check_held_slot(name, self._adapters)
        with self._turn:
            self._advance(0)
            self._connection.call("unload_adapter", name)
            del self._adapters[name]
            self._retired.add(name)
            self._forget(name)

    def adopt(self, name: str, version: int) -> None:
        """Makes its process load the manifest's teacher into the slot."""
        with self._turn:
            self._connection.call("adopt", name, version)
            self._adopted[name] = version

    def release(self, name: str) -> None:
        with self._turn:
            self._advance(0)
            self._connection.call("release", name)
            del self._adopted[name]
            self._forget(name)

    def adapters(self) -> tuple[str, ...]:
        return (*self._adapters, *self._adopted)

    def adapter_digest(self, name: str) -> str:
        check_held_slot(name, self._adapters)
        return str(self._connection.call("adapter_digest", name))

    def explain_slot(self, name: str, published: AdapterFiles) -> str:
        check_held_slot(name, self._adapters)
        return str(self._connection.call("explain_slot", *self._named(name, published)))

    def copies(self) -> tuple[RemoteEngine, ...]:
        return (self,)

    def score(
        self,
        token_ids_T: Sequence[int],
        adapters: Sequence[str | None],
        prefix_length: int | None = None,
        standing: Sequence[str] = (),
    ) -> list[Scored]:
        """See the torch engine: `prefix_length` has no effect, and digests are read on request."""
        return list(self._connection.call("score", tuple(token_ids_T), list(adapters)))

    # --- generation ---

    def submit(self, requests: Sequence[Request]) -> None:
        under_way = {*self._under_way}
        for request in requests:
            if request.adapter is not None:
                check_held_slot(request.adapter, self.adapters())
            check_request(request, under_way)
            under_way.add(request.request_id)
        with self._turn:
            self._under_way |= {each.request_id: each.adapter for each in requests}
            self._new.append(("submit", list(requests)))

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        with self._turn:
            ids = [*self._under_way] if request_ids is None else [*request_ids]
            if ids:
                self._new.append(("abort", ids))

    async def completions(self) -> AsyncGenerator[Completion]:
        """Yields completions. The calls block, like the steps of an engine in this process."""
        while True:
            await asyncio.sleep(0)
            if not self._ended and self._under_way:
                with self._turn:
                    self._advance(1)
            if not self._ended and not self._under_way:
                return
            while self._ended:
                completion = self._ended.popleft()
                del self._under_way[completion.request_id]
                if not self._under_way:
                    self._told = []
                yield completion

    def _advance(self, steps: int) -> None:
        operations, self._new = self._new, []
        if not operations and not steps:
            return
        ended = self._connection.call("advance", operations, steps)
        if operations or not self._told:
            self._told.append(_Told(operations))
        self._told[-1].steps += steps
        self._take(ended)

    def _take(self, ended: Sequence[Completion]) -> None:
        waiting = {each.request_id for each in self._ended}
        self._ended.extend(
            each for each in ended if each.request_id in self._under_way and each.request_id not in waiting
        )

    def _forget(self, name: str) -> None:
        """Forgets requests to a slot that is gone: they have ended, and are not repeated. Requests to its successor
        began after them, so they share batches with the same others as before."""
        told, known = [], set[int]()
        for each in self._told:
            operations = []
            for kind, given in each.operations:
                if kind == "submit":
                    left = [request for request in given if request.adapter != name]
                    known |= {request.request_id for request in left}
                else:
                    left = [number for number in given if number in known]
                if left:
                    operations.append((kind, left))
            if known:
                told.append(_Told(operations, each.steps))
        self._told = told

    def _named(self, name: str, adapter: AdapterFiles) -> tuple[Any, ...]:
        return name, adapter.version, adapter.digest, travelling(adapter.files, self._is_shared)

    def _tell_again(self) -> None:
        tell = self._connection.tell
        self._is_shared = self._share(tell)
        for name, version in self._adopted.items():
            tell("adopt", name, version)
        for name, adapter in self._adapters.items():
            tell("load_adapter", *self._named(name, adapter))
        again: set[int] = set()
        for each in self._told:
            again |= {request.request_id for kind, given in each.operations if kind == "submit" for request in given}
            ended = tell("advance", each.operations, each.steps)
            again -= {completion.request_id for completion in ended}
            self._take(ended)
        # Where bits are not guaranteed, a completion that was handed out may be longer this time.
        handed_out = again - self._under_way.keys()
        if handed_out:
            tell("advance", [("abort", sorted(handed_out))], 0)

    # --- the rest ---

    def sleep(self) -> None:
        """Does nothing: the engine does not share its device."""

    def wake(self) -> None: ...

    def read_servers(self) -> Sequence[ServerReading]:
        return ()

    def close(self) -> None:
        """The process stays for the next orchestrator; its session ends with the connection."""
