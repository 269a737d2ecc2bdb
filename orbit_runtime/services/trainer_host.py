"""The trainer's process: runs the orchestrator's calls on the same trainer side as `orbit run`."""

from __future__ import annotations

from collections.abc import Buffer, Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from orbit_runtime.adapters.buffer import AdapterBuffer
from orbit_runtime.adapters.files import files_digest
from orbit_runtime.checkpoints.adapter_folder import AdapterFolder, build_adapter, open_adapter
from orbit_runtime.digests import split
from orbit_runtime.errors import OrbitError
from orbit_runtime.policy.facts import PolicyFacts
from orbit_runtime.services.host import Host
from orbit_runtime.services.shared_store import HeldWriter, SharedStore, SharedStoreWriter
from orbit_runtime.services.side_manifest import SideManifest, common_facts
from orbit_runtime.sides.interface import TrainerOrder, TrainerSide
from orbit_runtime.sides.local import LocalSides
from orbit_runtime.storage import Content, Part, write_parts
from orbit_runtime.types import Probe


class TrainerCalls:
    """Calls of a trainer, for one thread."""

    def __init__(self, side: TrainerSide) -> None:
        self._side = side
        self._depot = SharedStore()
        self._trainer = side.trainer
        self._probing = ExitStack()
        self._initial = self.save()

    def reset(self) -> None:
        self.probe(None)
        self._trainer.load_state(self._initial)

    def begin(self, place: str, digest: str, files: Mapping[str, Buffer] | None) -> bool:
        """Begins with the adapter of that digest. False if `files` is None and `place` holds no such adapter here."""
        adapter = _adapter_at(place, digest) if files is None else build_adapter(place, files)
        if adapter is not None:
            self._side.begin(adapter, digest)
        return adapter is not None

    def publish_to(self, folder: str, standing: Mapping[str, Part]) -> dict[str, Part] | None:
        """Writes the adapter's files to a folder of the store. Returns None, and writes nothing, if others are
        `standing`.
        """
        buffer = AdapterBuffer()
        manifest = self._trainer.publish(buffer)
        parts = {name: Part(f"{folder}{name}", pieces) for name, pieces in manifest.files.items()}
        if standing and parts != standing:
            return None
        files = buffer.files()
        write_parts(
            self._depot.store,
            {
                part.key: Content(part.bytes, partial(split, files[name], part.pieces), part.pieces)
                for name, part in parts.items()
            },
        )
        return parts

    def publish(self) -> dict[str, Any]:
        buffer = AdapterBuffer()
        manifest = self._trainer.publish(buffer)
        return {"files": buffer.files(), "pieces": {name: list(each) for name, each in manifest.files.items()}}

    def explain(self, files: Mapping[str, Part | Buffer]) -> str:
        return "" if self._side.explain is None else self._side.explain(self._depot.read(files))

    def save(self) -> dict[str, Buffer]:
        held = HeldWriter()
        self._trainer.save_state(held)
        return held.parts

    def save_to(self, folder: str, execution: int) -> dict[str, Part]:
        """Like `save`, but to a folder of the store."""
        writer = SharedStoreWriter(self._depot.store, folder, execution)
        self._trainer.save_state(writer)
        return writer.parts

    def load(self, parts: Mapping[str, Part | Buffer]) -> None:
        self._trainer.load_state(self._depot.read(parts))

    def probe(self, kind: Probe | None) -> None:
        self._probing.close()
        if kind is not None:
            self._probing.enter_context(self._side.probing(kind))

    def calls(self) -> dict[str, Callable[..., Any]]:
        """The calls by name."""
        own = (
            self.begin, self.explain, self.publish, self.publish_to, self.save, self.save_to, self.load, self.probe,
        )  # fmt: skip
        return {each.__name__: each for each in own} | {
            "share": self._depot.share,
            "update": self._trainer.update,
            "column": self._trainer.column,
            "score": self._trainer.score,
            "base_digest": self._side.base_digest,
        }


def _adapter_at(place: str, digest: str) -> AdapterFolder | None:
    try:
        adapter = open_adapter(place)
    except OrbitError:
        return None
    return adapter if files_digest(adapter.files) == digest else None


def build_trainer_host(asked: SideManifest, note: Callable[[str], None], closing: ExitStack) -> Host:
    """
    Raises:
        OrbitError: the same errors as `orbit run` raises with this manifest before its first step.
    """
    sides = LocalSides(note)
    sides.load_loss(asked.resolved, asked.inputs.search_path, None)
    resolved = sides.settle(asked.resolved, asked.folder)
    side = sides.open(TrainerOrder(resolved, asked.folder, asked.model, closing, asked.teacher))
    from pydantic import TypeAdapter

    facts = {
        **common_facts("trainer", asked, side.base_digest(), side.rounding),
        "policy": TypeAdapter(PolicyFacts).dump_python(side.facts, mode="json"),
    }
    calls = TrainerCalls(side)
    return Host(facts, calls.calls(), calls.reset, is_over=side.is_over)
