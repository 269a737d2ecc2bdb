"""The engine over servers: an `Engine` whose slots and passes are on one or several servers, reached over HTTP.

Belongs here: slots, sleep and readings of all copies at once, the proof's view of one copy, and starting an engine with
servers of its own. Does not belong here: the queue of requests (`answer_queue`), one server's life (`replica`), its
kind (`sglang_api`, `vllm_api`), its arguments (`sglang_server`), servers that others started (`attached`).

Token ids go in, token ids and log-probs come out; text is never tokenised again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Buffer, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from orbit_runtime.data.routing import unpack_experts
from orbit_runtime.errors import EngineDiedError, GateError, UnsupportedError
from orbit_runtime.rollout.answer_queue import Answer, AnswerQueue
from orbit_runtime.rollout.replica import PATIENCE_SECONDS, Replica
from orbit_runtime.rollout.requests import check_held_slot, check_new_slot, check_request
from orbit_runtime.rollout.server_types import LoadedAdapter, ServerFacts, ServerHandle, Sleeping
from orbit_runtime.rollout.sglang_api import RoutedLayers, SGLangApi, merge_facts
from orbit_runtime.rollout.transport import AdapterMailbox
from orbit_runtime.rollout.wire import Wire, build_client
from orbit_runtime.types import BASE_VERSION, AdapterFiles, Request, Scored, ServerReading, Tokenizer

if TYPE_CHECKING:
    from orbit_runtime.policy.snapshot import Snapshot


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
        desk: AdapterMailbox,
        max_running_requests: int,
        sleeping: Sequence[Sleeping] = (),
    ) -> None:
        """
        Args:
            client: closed with the engine.
            desk: where its servers find adapters.
            max_running_requests: completions that one server samples at the same time.
            sleeping: what its servers give back between `sleep` and `wake`.
        """
        self._client = client
        self.desk = desk
        self._sleeping = tuple(sleeping)
        self.loaded: dict[str, LoadedAdapter] = {}
        """Adapters that every copy must hold; replicas read this."""
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
        self.completions, self.abort = self._queue.completions, self._queue.abort
        self.listen, self.take_deltas = self._queue.listen, self._queue.take_deltas

    def attach(self, replicas: Sequence[Replica]) -> list[ServerFacts]:
        """Connects the replicas, whose servers must answer by now; call it once. Returns the servers' descriptions.

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
            check_new_slot(name, self.loaded, self._retired)
            self.desk.take(name, adapter)
            self.loaded[name] = loaded = LoadedAdapter(adapter, partial(self.desk.files, name))
            # A server that is lost just now gets it as files, once it is back.
            copies = [each.name for each in self.replicas if each.is_up and each.about]
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

    def slot(self, name: str) -> LoadedAdapter:
        check_held_slot(name, self.loaded)
        return self.loaded[name]

    def _retire(self, name: str) -> None:
        del self.loaded[name]
        self._retired.add(name)
        self._everywhere(lambda replica: replica.unload(name))
        self.desk.drop(name)

    def _everywhere(self, work: Any) -> None:
        """Runs `work` on all copies at once; if some fail, all have ended before the first failure is raised."""

        async def all_of_them() -> None:
            tasks = [replica.ask(partial(work, replica)) for replica in self.replicas]
            for found in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(found, BaseException):
                    raise found

        self.call(all_of_them())

    def _version(self, adapter: str | None) -> int:
        """The policy version of an adapter. The publish's proof ties name and bytes; the plug-in reports the name that
        sampled each token.
        """
        return BASE_VERSION if adapter is None else self.slot(adapter).adapter.version

    # --- completions ---

    def submit(self, requests: Sequence[Request]) -> None:
        under_way = set(self._queue.under_way)
        for request in requests:
            self._version(request.adapter)
            check_request(request, under_way)
            under_way.add(request.request_id)
        self._queue.submit([Answer(each, self._version(each.adapter)) for each in requests])

    @property
    def under_way(self) -> Collection[int]:
        return self._queue.under_way

    def kinds(self) -> set[str]:
        """Kinds of its servers, as `planner.support.manifests` names them."""
        abouts = [replica.about for replica in self.replicas if replica.about]
        return {
            "SGLang without plug-in" if about.kind == "SGLang" and about.plugin is None else about.kind
            for about in abouts
        }

    def revive(self) -> None:
        """Restarts those of our own servers that have died."""
        for replica in self.replicas:
            if replica.is_up and not replica.server.is_alive():
                self.loop.call_soon_threadsafe(replica.begin_revival)

    def call[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it on the client's own thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()


class ServedCopy:
    """A view for one proof: the plug-in's facts after the newest pass answer every question about the slots."""

    def __init__(self, engine: ServedEngine, replica: Replica) -> None:
        self._engine = engine
        self._replica = replica
        self._told: Mapping[str, Mapping[str, Any]] = {}
        self.name = replica.name
        self.is_tapped = replica.taps is not None

    @property
    def reads_back(self) -> bool:
        return self._replica.reads_back

    def score(
        self,
        token_ids_T: Sequence[int],
        adapters: Sequence[str | None],
        prefix_length: int | None = None,
        standing: Sequence[str] = (),
    ) -> list[Scored]:
        """Prefills of the same tokens, all in one request."""
        replica, named = self._replica, sorted({name for name in adapters if name})

        async def readings() -> list[Scored]:
            asked = None
            if replica.taps and named:
                from orbit_runtime.rollout.taps import asked_facts

                held = replica.num_bytes({*named, *standing})
                asked = asked_facts(replica.taps, token_ids_T, named, standing, held)
            with asked or nullcontext() as told:
                scores = await replica.ask(partial(replica.score, token_ids_T, adapters, prefix_length))
                told_now = await told() if told else None
            if told_now is not None:
                self._told = merge_facts([told_now])
            else:
                self._told = await replica.ask(replica.facts) if self.reads_back and named else {}
            return [
                replace(scored, applied_digest=self._told.get(name, {}).get("applied_digest") if name else None)
                for name, scored in zip(adapters, scores, strict=True)
            ]

        return self._engine.call(readings())

    def adapter_digest(self, name: str) -> str | None:
        """Digest of the server's buffers, as the plug-in read them after the newest pass, or reads them now."""
        self._engine.slot(name)
        if not self.reads_back:
            return None
        facts = self._told.get(name) or self._facts().get(name)
        if facts is not None and facts["slot_digest"] is None:
            # Loaded, but in no slot at the moment: a pass brings it into one.
            self._engine.call(self._replica.ask(partial(self._replica.api.score, (0, 0), [name])))
            facts = self._facts().get(name)
        return str((facts or {}).get("slot_digest"))

    def explain_slot(self, name: str, published: AdapterFiles) -> str:
        if not self.reads_back:
            return ""
        loaded = self._engine.slot(name)
        # All copies share one folder, so only one may ask at a time.
        with self._engine.explaining, self._engine.desk.explaining(name) as homes:
            facts = self._facts().get(name)
        if facts is None:
            return "the server does not hold it: it was evicted, or unloaded by someone else"
        folder = Path(facts["path"])
        if folder.is_absolute() and folder not in homes:
            found = {each.name: each.read_bytes() for each in folder.iterdir()} if folder.is_dir() else {}
            return f"the server loaded it from {folder}: {_difference(published.files, found)}"
        return _difference(published.files, loaded.adapter.files) or str(facts["difference"] or "")

    def snapshot(self, token_ids_T: Sequence[int], adapter: str | None) -> Snapshot:
        """The tensors that the server's layers hold, and what they compute for these tokens; for one caller at a time.

        Raises:
            GateError: the plug-in gave no answer.
            UnsupportedError: the server has no plug-in to ask.
        """
        from orbit_runtime.rollout.taps import build_snapshot

        if self._replica.taps is None:
            raise UnsupportedError("this server's layers cannot be inspected", fix="let Orbit start the server")
        asked = partial(self._tapped, self._replica.taps, tuple(token_ids_T), adapter)
        answers, scored = asked(())
        routed = None if scored.routed_experts is None else unpack_experts(scored.routed_experts)
        found = build_snapshot(answers, len(token_ids_T) - 1, values=lambda names: asked(names)[0])
        return replace(found, routed_TLC=routed)

    def _tapped(
        self, taps: Path, token_ids_T: tuple[int, ...], adapter: str | None, names: Sequence[str]
    ) -> tuple[list[bytes], Scored]:
        from orbit_runtime.rollout.taps import asked_pass

        replica = self._replica
        ranks = replica.about.ranks if replica.about else 1
        try:
            with asked_pass(taps, token_ids_T, adapter, names, ranks) as told:
                (scored,) = self._engine.call(replica.ask(partial(replica.api.score, token_ids_T, [adapter])))
                return told(), scored
        except FileNotFoundError:
            raise GateError("the plug-in reported nothing about the requested pass", where="rollout") from None

    def _facts(self) -> Mapping[str, Mapping[str, Any]]:
        return self._engine.call(self._replica.ask(self._replica.facts))


def _difference(published: Mapping[str, Buffer], found: Mapping[str, Buffer]) -> str:
    try:
        from orbit_runtime.adapters.state import explain_difference
    except ImportError:
        # An orchestrator needs no torch.
        equal = published.keys() == found.keys() and all(published[name] == found[name] for name in published)
        return "" if equal else "other files than were published"
    return explain_difference(published, found)


class OwnServer(ServerHandle, Protocol):
    """An SGLang server that Orbit starts, in this process's machine or by `orbit inference`."""

    @property
    def deterministic(self) -> bool:
        """Whether it was set up for requests that bring their seed."""

    @property
    def routed(self) -> RoutedLayers | None:
        """Layers whose experts it reports; None for none."""

    @property
    def taps(self) -> Path | None:
        """Folder for requests to the plug-in about a pass; None if it is on another machine."""


def start_engine(
    servers: Sequence[OwnServer],
    tokenizer: Tokenizer,
    *,
    desk: AdapterMailbox,
    max_running_requests: int,
    at_once: int = 1,
    patience: float = PATIENCE_SECONDS,
    sleeping: Sequence[Sleeping] = (),
) -> ServedEngine:
    """Starts the servers; if one fails, all are stopped.

    Args:
        desk: where the servers find adapters.
        at_once: servers that start at the same time; on a CPU they would slow each other down.
        sleeping: what the servers, started with support for it, release while the trainer works.
        patience: seconds that a request may take before its server is checked for progress.

    Raises:
        EngineDiedError: a server does not start, or runs without Orbit's plug-in.
    """
    client = build_client()
    engine = ServedEngine(
        tokenizer, client, desk=desk, max_running_requests=max_running_requests, sleeping=sleeping
    )  # fmt: skip
    try:
        start_servers(servers, at_once)
        replicas = []
        for index, server in enumerate(servers):
            name = "the engine" if len(servers) == 1 else f"replica {index}"
            api = SGLangApi(Wire(client, server), deterministic=server.deterministic, routed=server.routed)
            replicas.append(
                Replica(name, server, api, engine.loaded, taps=server.taps, whose="Ours", patience=patience)
            )
        engine.attach(replicas)
        for replica in replicas:
            if not replica.reads_back:
                raise EngineDiedError(
                    f"{replica.name} runs without Orbit's plug-in, so no adapter could be proven in it",
                    fix=replica.server.describe(),
                )
    except BaseException:
        for server in servers:
            server.stop()
        engine.close()
        raise
    return engine


def start_servers(servers: Sequence[ServerHandle], at_once: int) -> None:
    """Returns once all respond. Raises: as `ServerHandle.start`."""
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda server: server.start(), servers))
