"""One copy of an engine: a server, the adapters it must hold, and how it is brought back when lost.

Belongs here: everything about one server. Does not belong here: the choice among several (`answer_queue`), the
API of each kind of server (`sglang_api`, `vllm_api`).

A lost server gets no work until it responds again and holds every adapter that it must, each one verified: through the
plug-in by its digest, and without the plug-in by the log-probs that it gave when it was proven.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from orbit_runtime.adapters.files import seconds_for
from orbit_runtime.adapters.ticket import NOT_ARRIVED
from orbit_runtime.errors import EngineDiedError, GateError, OrbitError, UnsupportedError
from orbit_runtime.rollout.server_types import (
    Api,
    Call,
    LoadedAdapter,
    LostError,
    ServerFacts,
    ServerHandle,
    Sleeping,
    TokenPiece,
)
from orbit_runtime.rollout.transport import AdapterTransfer
from orbit_runtime.types import AdapterFiles, Scored, ServerReading
from orbit_runtime.workers.child.heartbeat import sign
from orbit_runtime.workers.servers.process import PINNED_SGLANG
from orbit_runtime.workers.servers.protocol import FACTS_VERSION

TRIES = 3
CHECKS = 3
"""Consecutive checks without progress after which a server counts as hung."""
PATIENCE_SECONDS = 60.0
"""Seconds after which a request's server is checked for progress."""
HEALTH_SECONDS = 1.0
"""Interval between health checks of a server that is busy with an adapter's bytes."""
Whose = Literal["Ours", "Others", "Resumed"]
"""`Ours`: Orbit starts it with the run's model, which may be in another folder after a restart. `Others`: it outlives
the run, and the adapters that it holds are another run's. `Resumed`: likewise, but an adapter under a new name was left
by this run when it was killed.
"""


class Replica:
    """One server of an engine, within one event loop. `name` identifies it to people."""

    def __init__(
        self,
        name: str,
        server: ServerHandle,
        api: Api,
        adapters: Mapping[str, LoadedAdapter],
        *,
        taps: Path | None = None,
        whose: Whose = "Others",
        tolerance: float = 1e-3,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """
        Args:
            adapters: what every copy must hold; the engine's own table, which changes.
            taps: folder for snapshot requests to the plug-in; None: this server's layers cannot be inspected.
            tolerance: how far log-probs of the same adapter may differ before and after a restart.
        """
        self.name = name
        self.server = server
        self.api = api
        self.taps = taps
        self.about: ServerFacts | None = None
        self.restarts = 0
        self.missed = 0
        """Adapters that were loaded from files because the other transport failed."""
        self.failure: OrbitError | None = None
        """Why it could not be brought back."""
        self.on_change: Callable[[], Awaitable[None]] | None = None
        """Called when it came back, or could not be brought back."""
        self._adapters = adapters
        self._held: set[str] = set()
        self._begun: set[str] = set()
        """Adapters whose load got no response: the server may hold them."""
        self._witnesses: dict[str, tuple[tuple[int, ...], tuple[float, ...]]] = {}
        self._whose = whose
        self._tolerance = tolerance
        self._patience = patience
        self._revival: asyncio.Task[None] | None = None
        self._asleep = False

    @property
    def is_up(self) -> bool:
        return self._revival is None and self.failure is None

    def num_bytes(self, names: Collection[str] | None = None) -> int:
        """Size of these adapters, or of all that it must hold."""
        return sum(loaded.num_bytes for name, loaded in self._adapters.items() if names is None or name in names)

    @property
    def _busy_seconds(self) -> float:
        """Seconds for which a server may show no progress because it works on its adapters' bytes."""
        return seconds_for(self.num_bytes())

    @property
    def reads_back(self) -> bool:
        """Whether it runs the plug-in."""
        return self.about is not None and self.about.plugin is not None

    async def introduce(self) -> ServerFacts:
        """Queries what the server is; after a restart it must be the same as before."""
        found = await self.api.about()
        if found.plugin is not None and found.plugin != FACTS_VERSION:
            raise EngineDiedError(
                f"{self.name} runs another version of Orbit's plug-in ({found.plugin}, this Orbit reads "
                f"{FACTS_VERSION})",
                fix="install the same version of Orbit beside the server",
            )
        if found.unhooked:
            raise UnsupportedError(
                f"{self.name}: SGLang {found.version} has no {', '.join(found.unhooked)} "
                "that Orbit's plug-in could hook",
                fix=f"install sglang=={PINNED_SGLANG}, which Orbit is made for",
            )
        before = self.about
        if before is not None and (
            (before.version, before.plugin) != (found.version, found.plugin)
            or (before.model != found.model and self._whose != "Ours")
        ):
            raise GateError(
                f"{self.name} came back as {found.kind} {found.version} with {found.model}; it was {before.kind} "
                f"{before.version} with {before.model}"
                + ("" if before.plugin == found.plugin else ", with Orbit's plug-in in only one of them"),
                where="rollout",
            )
        self.about = found
        return found

    async def read(self) -> ServerReading:
        """Reads the server's metrics: a server that is lost or refuses to report is not an error here."""
        told = ""
        if self.is_up:
            with suppress(LostError, GateError):
                told = await self.api.exposition()
        memory = await asyncio.to_thread(self.server.memory_bytes)
        return ServerReading(self.name, self.is_up, self.restarts, self.missed, told, memory)

    # --- sleeping ---

    async def sleep(self, parts: Sequence[Sleeping]) -> None:
        await self.api.sleep(parts)
        self._asleep = True

    async def wake(self, parts: Sequence[Sleeping]) -> None:
        """A server lost while asleep came back awake. Every adapter is verified where possible."""
        if not self._asleep:
            return
        await self.api.wake(parts)
        self._asleep = False
        for name in [*self._adapters]:
            await self._check_held(name, "its sleep")

    # --- asking ---

    async def ask[T](self, work: Callable[[], Awaitable[T]]) -> T:
        """Makes a call; if the server is lost meanwhile, waits until it is back and tries again.

        Raises:
            EngineDiedError: it was lost too many times, or did not come back.
        """
        for attempt in range(TRIES):
            await self.wait_up()
            try:
                return await self.attempt(work)
            except LostError as error:
                if attempt + 1 == TRIES:
                    raise self.died(error) from None
        raise AssertionError("unreachable")

    async def attempt[T](self, work: Callable[[], Awaitable[T]]) -> T:
        """Makes one try. On a loss, starts bringing the server back and raises."""
        async with self._noticed(None):
            return await self._watched(work())

    async def stream(self, call: Call, eos: Sequence[int]) -> AsyncGenerator[TokenPiece]:
        """Makes one try. On a loss, or if the server no longer holds the adapter, starts bringing it back and raises.

        The next piece may take any time: a server counts as lost only when it shows no progress.
        """
        async with self._noticed(call.first.adapter), aclosing(self.api.stream(call, eos)) as pieces:
            while (piece := await self._watched(anext(pieces, None))) is not None:
                yield piece

    @asynccontextmanager
    async def _noticed(self, needs: str | None) -> AsyncGenerator[None]:
        restarts = self.restarts
        try:
            yield
        except LostError:
            self.begin_revival()
            raise
        except GateError:
            if self.restarts != restarts:
                raise LostError("it was restarted meanwhile, and did not hold its adapters yet") from None
            if needs is None or await self._holds(needs):
                raise
            self.begin_revival()
            raise LostError(f"it no longer holds {needs}: it was restarted, or dropped it by itself") from None

    def died(self, error: LostError) -> EngineDiedError:
        return EngineDiedError(f"{self.name} was lost {TRIES} times: {error}", fix=self.server.describe())

    async def wait_up(self) -> None:
        while self._revival is not None:
            await asyncio.shield(self._revival)
        if self.failure is not None:
            raise self.failure

    async def _watched[T](self, work: Awaitable[T]) -> T:
        """A hung server accepts requests and answers none, so it is checked for progress while one takes long."""
        task = asyncio.ensure_future(work)
        silent, since = 0, 0.0
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=self._patience)
                if done:
                    sign()
                    return task.result()
                since = since if silent else time.monotonic()
                silent = 0 if await self.api.makes_progress() else silent + 1
                if not silent:
                    sign()
                if silent >= CHECKS and time.monotonic() - since >= self._busy_seconds:
                    raise LostError(f"{self.server.url} answers, but shows no progress")
        finally:
            task.cancel()
            # A stream can be closed only when nothing waits for its next piece.
            await asyncio.wait({task})

    # --- adapters ---

    async def load(self, name: str) -> None:
        """Safe to call again: a server that came back meanwhile already holds it."""
        if name in self._held:
            return
        was_begun = name in self._begun
        self._begun.add(name)
        try:
            await self._hand(name, was_begun)
        except GateError as error:
            raise GateError(f"{self.name} refused adapter {name}: {error.message}", where="publish") from None
        self._begun.discard(name)
        self._held.add(name)

    async def _hand(self, name: str, was_begun: bool) -> None:
        loaded = self._adapters[name]
        try:
            if loaded.handover is None or not await self._take(name, loaded.adapter, loaded.handover):
                await self._load_files(name, loaded)
        except GateError:
            if not (was_begun or self._whose == "Resumed") or not await self._has(name):
                raise
            # The previous try timed out but then succeeded (the proof shows what the server holds), or it was left.
            if not was_begun:
                await self.api.unload(name)
                await self._load_files(name, loaded)

    async def _load_files(self, name: str, loaded: LoadedAdapter) -> None:
        await self.api.load(name, loaded.adapter, await asyncio.to_thread(loaded.files))

    async def _take(self, name: str, adapter: AdapterFiles, handover: AdapterTransfer) -> bool:
        """Whether the adapter came by the transport."""
        if not handover.take(self.name):
            return False
        try:
            await self.api.load(name, adapter, handover.folder)
        except GateError as error:
            if NOT_ARRIVED not in error.message:
                raise
        else:
            return True
        self.missed += 1
        with suppress(GateError):
            # If it arrived at only some of the server's processes, all of them must free the name.
            await self.api.unload(name)
        return False

    async def unload(self, name: str) -> None:
        self._witnesses.pop(name, None)
        if name in self._held:
            try:
                await self.api.unload(name)
            except GateError:
                # An adapter that is already gone is what was asked for; the next proof would have shown a loss.
                if await self._holds(name):
                    raise
            self._held.discard(name)

    async def leave(self) -> None:
        """Takes this run's adapters from a server that outlives the run; one that does not answer keeps them."""
        if self.is_up and self._whose != "Ours":
            for name in [*self._held]:
                with suppress(LostError, OrbitError):
                    await self.api.unload(name)

    async def score(
        self, token_ids_T: Sequence[int], adapters: Sequence[str | None], prefix_length: int | None = None
    ) -> list[Scored]:
        """Scores tokens; the first reading of an adapter is kept to recognise it by."""
        found = await self.api.score(token_ids_T, adapters, prefix_length)
        for adapter, scored in zip(adapters, found, strict=True):
            if adapter is not None:
                self._witnesses.setdefault(adapter, (tuple(token_ids_T), scored.logprobs_T))
        return found

    async def facts(self) -> Mapping[str, Mapping[str, Any]]:
        return await self.api.facts(self.num_bytes()) or {}

    async def _holds(self, name: str) -> bool:
        """True if the server cannot be asked; the refusal itself is then reported."""
        try:
            return await self._has(name)
        except (LostError, GateError):
            return True

    async def _has(self, name: str) -> bool:
        return name in await self.api.names()

    # --- coming back ---

    def begin_revival(self) -> None:
        """Starts bringing it back, unless that is already in progress."""
        if self.is_up:
            self._revival = asyncio.ensure_future(self._revive())

    async def _revive(self) -> None:
        try:
            await self._bring_back()
        except OrbitError as error:
            self.failure = error
        except LostError as error:
            self.failure = self.died(error)
        finally:
            self._revival = None
            if self.on_change is not None:
                await self.on_change()

    async def _bring_back(self) -> None:
        """Starts a new server with the same adapters, each verified before it gets work."""
        if await self._is_well():
            return
        for attempt in range(TRIES):
            await asyncio.to_thread(self.server.stop)
            await asyncio.to_thread(self.server.start)
            self.restarts += 1
            self._held.clear()
            self._begun.clear()
            self._asleep = False
            try:
                await self._fill()
                return
            except LostError:
                if attempt + 1 == TRIES:
                    raise

    async def _is_well(self) -> bool:
        """Whether it is alive and holds what it must. A server that works on an adapter's bytes is waited for."""
        until = time.monotonic() + self._busy_seconds
        while self.server.is_alive():
            if await self.api.is_healthy():
                return self._held <= await self.api.names()
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(min(HEALTH_SECONDS, self._busy_seconds))
        return False

    async def _fill(self) -> None:
        await self.introduce()
        standing = await self.api.names()
        for name in [*self._adapters]:
            if name in standing:
                self._held.add(name)
            handover = self._adapters[name].handover
            if handover is not None:
                # A server that came back gets the adapter from files.
                handover.take(self.name)
            await self.load(name)
            await self._check_held(name, "a restart")

    async def _check_held(self, name: str, what: str) -> None:
        published = self._adapters[name].adapter
        if self.reads_back:
            await self.api.score((0, 0), [name])
            found = (await self.facts()).get(name, {}).get("slot_digest")
            if found != published.digest:
                raise GateError(
                    f"after {what} {self.name} holds {str(found)[:19]}… as {name}, not {published.digest[:19]}…",
                    where="rollout",
                )
        elif name in self._witnesses:
            tokens, before = self._witnesses[name]
            (now,) = await self.api.score(tokens, [name])
            moved = max(abs(a - b) for a, b in zip(before, now.logprobs_T, strict=True))
            if not moved <= self._tolerance:
                raise GateError(
                    f"after {what} {self.name} gives other log-probs under {name}: they moved by {moved:.3g}, "
                    f"limit {self._tolerance:.3g}",
                    where="rollout",
                )
