"""The trainer in another process, as a `Trainer` for the loop; torch-free.

Its state is a function of what it was told: the state last saved or loaded, and the updates since. The state is in the
run's store and the updates are on this machine's disk, so a restarted trainer is told them again and arrives, bit for
bit, at the state of the lost one. Belongs here: this. Does not belong here: the connection (`connection`), the server
(`calls`).
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Buffer, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from orbit_runtime.checkpoints.adapter_folder import AdapterFolder, adapter_name
from orbit_runtime.digests import Piece, cut, tree_digest
from orbit_runtime.errors import GateError
from orbit_runtime.services.connection import Connection
from orbit_runtime.services.frames import frame
from orbit_runtime.services.shared_store import PASSING, travelling
from orbit_runtime.storage import CheckpointParts, Execution, Part, Store, StoredFiles, standing_parts, withdraw_bundle
from orbit_runtime.types import (
    AdapterFiles,
    AdapterManifest,
    AdapterSink,
    Computed,
    Probe,
    Sample,
    Scored,
    StateWriter,
    UpdateResult,
)


class RemoteTrainer:
    """A `Trainer`, for the loop's thread."""

    def __init__(
        self,
        connection: Connection,
        store: Store,
        execution: Execution,
        share: Callable[[Callable[..., Any]], bool],
        scratch: Path,
        rates: tuple[float, float] | None,
    ) -> None:
        """
        Args:
            store: the run's store.
            share: tests whether its process sees that store; see `shared_store`.
            scratch: an empty folder for updates that may have to be repeated.
            rates: peak learning rates of policy and critic that the run began with; None if its process has them.
        """
        self._connection = connection
        self._store = store
        self._execution = execution
        self._share = share
        self._is_shared = share(connection.call)
        self._rates = rates
        if rates is not None:
            connection.call("take_rates", *rates)
        self._scratch = scratch
        self._base: Mapping[str, Buffer] = {}
        """Parts of the state last saved or loaded; empty for the state that a first step expects."""
        self._begun: tuple[AdapterFolder, str] | None = None
        """The adapter that it began with; None for one that changes nothing, or for a state."""
        self._updates: list[Path] = []
        """Samples of the updates since, in order."""
        self._probe: Probe | None = None
        self._named = 0
        self._passing: list[str] = []
        """Keys written to the store only for inspection."""
        connection.on_restart = self._tell_again

    def update(self, samples_D: Sequence[Sample]) -> UpdateResult:
        body = frame([list(samples_D)])
        result: UpdateResult = self._connection.call_framed("update", body)
        self._updates.append(self._spool(body))
        return result

    def begin(self, adapter: AdapterFolder, digest: str) -> None:
        """The process reads the adapter from its place; if it finds other files there or none, it gets the bytes."""
        self._begin(self._connection.call, adapter, digest)
        self._begun = (adapter, digest)

    def column(self, name: Computed, samples_D: Sequence[Sample]) -> list[array[float]]:
        return list(self._connection.call("column", name, list(samples_D)))

    def published(self, version: int, *, is_kept: bool) -> AdapterFiles | None:
        """Has its process write the adapter to its final place, or to one for inspection; None if it sees no store."""
        if not self._is_shared:
            return None
        standing: Mapping[str, Part] = {}
        if is_kept:
            folder = f"adapters/{adapter_name(version)}/"
            standing = standing_parts(self._store, folder, self._execution)
        else:
            self.tidy()
            self._named += 1
            folder = f"{PASSING}/e{self._execution.number:06d}/{self._named}/"
        parts = self._connection.call("publish_to", folder, dict(standing))
        if parts is None:
            withdraw_bundle(self._store, self._execution, folder)
            parts = self._connection.call("publish_to", folder, {})
        if not is_kept:
            self._passing = [part.key for part in parts.values()]
        pieces = {name: part.pieces for name, part in parts.items()}
        return AdapterFiles(version, StoredFiles(self._store, parts), tree_digest(pieces), pieces)

    def tidy(self) -> None:
        """Removes what was written only for inspection. Safe to call twice."""
        keys, self._passing = self._passing, []
        self._store.delete(keys)

    def publish(self, sink: AdapterSink) -> AdapterManifest:
        """Raises GateError if the bytes that arrive are not those that the trainer hashed."""
        told = self._connection.call("publish")
        found = {}
        for name, data in told["files"].items():
            pieces: Sequence[Piece] = told["pieces"][name]
            found[name] = sink.write(name, memoryview(data).nbytes, _parts(data, pieces))
            if found[name] != tuple(pieces):
                raise GateError(f"{name} changed on its way from the trainer", where="publish")
        return AdapterManifest(found)

    def score(self, token_ids_T: Sequence[int]) -> tuple[Scored, Scored]:
        adapted, base = self._connection.call("score", tuple(token_ids_T))
        return adapted, base

    def explain(self, files: Mapping[str, Buffer]) -> str:
        """See `TrainerSide.explain`."""
        return str(self._connection.call("explain", travelling(files, self._is_shared)))

    @contextmanager
    def probing(self, kind: Probe) -> Iterator[None]:
        """While active, the trainer holds an untrained probe adapter."""
        self._connection.call("probe", kind)
        self._probe = kind
        try:
            yield
        finally:
            self._probe = None
            self._connection.call("probe", None)

    def base_digest(self) -> str:
        return str(self._connection.call("base_digest"))

    # --- state ---

    def save_state(self, writer: StateWriter) -> None:
        if self._is_shared and isinstance(writer, CheckpointParts):
            parts: Mapping[str, Part] = self._connection.call("save_to", writer.folder, self._execution.number)
            writer.stand(parts)
            self._hold(StoredFiles(self._store, parts))
            return
        held: Mapping[str, Buffer] = self._connection.call("save")
        self._hold(held)
        for name, data in held.items():
            writer.write(name, memoryview(data).nbytes, partial(cut, data))

    def load_state(self, parts: Mapping[str, Buffer]) -> None:
        self._connection.call("load", travelling(parts, self._is_shared))
        self._hold(parts)

    def _hold(self, parts: Mapping[str, Buffer]) -> None:
        """Makes this the state from which a restarted trainer begins."""
        before, self._updates, self._begun, self._base = self._updates, [], None, parts
        for path in before:
            path.unlink()

    def _spool(self, blocks: Iterable[Buffer]) -> Path:
        self._named += 1
        path = self._scratch / str(self._named)
        with path.open("wb") as file:
            for block in blocks:
                file.write(block)
        return path

    @staticmethod
    def _begin(tell: Callable[..., Any], adapter: AdapterFolder, digest: str) -> None:
        if not tell("begin", adapter.place, digest, None):
            tell("begin", adapter.place, digest, dict(adapter.files))

    def _tell_again(self) -> None:
        tell = self._connection.tell
        self._is_shared = self._share(tell)
        if self._rates is not None:
            tell("take_rates", *self._rates)
        if self._base:
            tell("load", travelling(self._base, self._is_shared))
        elif self._begun is not None:
            self._begin(tell, *self._begun)
        for path in self._updates:
            self._connection.tell_framed("update", [_mapped(path)])
        if self._probe is not None:
            tell("probe", self._probe)


def _mapped(path: Path) -> Buffer:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _parts(data: Buffer, pieces: Sequence[Piece]) -> Iterator[memoryview]:
    view, position = memoryview(data).cast("B"), 0
    for piece in pieces:
        yield view[position : position + piece.bytes]
        position += piece.bytes
