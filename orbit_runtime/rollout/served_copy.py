"""A copy for proofs: one server of an engine, read by the thread that runs the loop.

Belongs here: readings of one copy. Does not belong here: sampling (`served_engine`).
"""

from __future__ import annotations

from collections.abc import Buffer, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orbit_runtime.data.routing import unpack_experts
from orbit_runtime.errors import GateError, UnsupportedError
from orbit_runtime.rollout.sglang_api import merge_facts
from orbit_runtime.types import AdapterFiles, Scored

if TYPE_CHECKING:
    from orbit_runtime.policy.snapshot import Snapshot
    from orbit_runtime.rollout.replica import Replica
    from orbit_runtime.rollout.served_engine import ServedEngine


class ServedCopy:
    """A view for one proof: the plug-in's facts after the newest pass answer every question about the slots."""

    def __init__(self, engine: ServedEngine, replica: Replica) -> None:
        self._engine = engine
        self._replica = replica
        self._told: Mapping[str, Mapping[str, Any]] = {}

    @property
    def name(self) -> str:
        return self._replica.name

    @property
    def reads_back(self) -> bool:
        return self._replica.reads_back

    @property
    def is_tapped(self) -> bool:
        return self._replica.taps is not None

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
        """What the server's layers hold, and compute for these tokens; for one caller at a time.

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
        from orbit_runtime.adapters.difference import explain_difference
    except ImportError:
        # An orchestrator needs no torch.
        equal = published.keys() == found.keys() and all(published[name] == found[name] for name in published)
        return "" if equal else "other files than were published"
    return explain_difference(published, found)
