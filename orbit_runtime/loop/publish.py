"""One publish: bytes to the store, bytes to the engine, proof; and which published version samples.

Belongs here: the order of these steps, the thread that makes results durable, activating and retiring versions. Does
not belong here: what the proof checks (`parity.liveness`), what a checkpoint holds (`keep`), moving requests in flight
to a new version (`multiplexer`).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Buffer, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from orbit_runtime.adapters.buffer import publishable
from orbit_runtime.adapters.files import expected_applied_digest
from orbit_runtime.checkpoints.adapter_folder import ADAPTERS, adapter_name
from orbit_runtime.digests import Pieces, split
from orbit_runtime.errors import EngineDiedError, GateError, OrbitError
from orbit_runtime.loop.fault_finder import FaultFinder
from orbit_runtime.model_info.content import FILES
from orbit_runtime.parity.liveness import Limits, Proof, Reading, check_proofs, check_unproven, prove
from orbit_runtime.storage import Content, Execution, Store, StoredFiles, standing_content, write_bundle
from orbit_runtime.types import AdapterFiles, Copy, Engine, Scored, Trainer

MODELS = "models/"
"""Folder of what a run published if all weights train."""


@dataclass(frozen=True)
class Publication:
    """The policy that the engine holds now, with its evidence."""

    adapter: AdapterFiles
    proofs: tuple[Proof, ...]
    """One for each copy of the engine."""
    readings: tuple[Reading, ...]
    unproven: int = 0
    """Consecutive publishes, including this one, that could not be proven because of noise."""

    @property
    def is_proven(self) -> bool:
        return not self.unproven

    @property
    def proof(self) -> Proof:
        """The proof with the smallest margin to its limit; there is at least one if there is an engine."""
        return max(self.proofs, key=lambda proof: proof.change_error)

    @property
    def version(self) -> int:
        return self.adapter.version

    @property
    def name(self) -> str:
        return adapter_name(self.adapter.version)


@dataclass(frozen=True)
class Publisher:
    """The two sides and the canary, which stay the same for a whole run."""

    store: Store
    execution: Execution
    keeper: BackgroundWriter
    """Writes the adapter while it is loaded and proven; the publish is durable once `keeper.wait` returns."""
    engine: Engine
    trainer: Trainer
    canary_T: tuple[int, ...]
    change_limit: float
    base_weights: str
    """Digest of the base's files; stored with the adapter, which fits no other base."""
    bisect: FaultFinder
    """Finds the rank, layer and tensor at fault when a proof fails."""
    base_limit: float = math.inf
    """Limit for the mean |d| on the canary with no adapter."""
    max_unproven: int = 0
    """Consecutive publishes that noise may leave unproven."""
    loads_beside: bool = False
    """Whether the engine may load while the trainer computes its part of the proof: neither computes in the other's
    process."""

    def publish(self, version: int, previous: Publication | None) -> Publication:
        """Publishes the trainer's adapter as `policy-v{version}` and proves it on every copy, alongside `previous`.

        The engine loads the published bytes, never the trainer's tensors.

        Raises:
            EngineDiedError: the engine is lost and did not come back.
            GateError: a check failed, or too many consecutive publishes were unproven; the evidence is stored and
                `previous` stays active.
        """
        adapter = publishable(self.trainer, version)
        load = partial(self.engine.load_adapter, adapter_name(version), adapter)
        loaded = _begun(load) if self.loads_beside else None
        adapted, base = self.trainer.score(self.canary_T)
        facts = adapter_facts(adapter, self.canary_T, (adapted, base), self.base_weights)
        self.keeper.submit(partial(write_adapter_bundle, self.store, self.execution, adapter, facts))
        assert adapter.pieces is not None
        # The same for every copy; computed before any server waits for it.
        expected = expected_applied_digest(adapter.files, adapter.pieces)
        told = self.bisect.explain_trainer(adapter) if adapted.applied_digest != expected else []
        try:
            loaded.result() if loaded else load()
        except EngineDiedError:
            # Says nothing about the adapter; the same run continues once the engine is back.
            raise
        except OrbitError as error:
            failures = [f"the engine did not load it: {error}", *told]
            self._keep_evidence(version, {"version": version, "proven": False, "failures": failures})
            raise GateError(
                f"policy version {version} could not be proven live: {'; '.join(failures)}", where="publish"
            ) from error
        copies = self.engine.copies()
        pairs = [*zip(copies, previous.readings if previous else (None,) * len(copies), strict=True)]
        prove_one = partial(self._prove, adapter, expected, (adapted, base))
        if len(pairs) == 1:
            # The copy may compute in this process, and torch's thread count is a setting of the calling thread.
            found = [prove_one(pairs[0])]
        else:
            # Each copy is another server, and most of a proof is waiting for it.
            with ThreadPoolExecutor(len(pairs)) as pool:
                found = list(pool.map(prove_one, pairs))
        proofs, readings = [proof for proof, _ in found], [reading for _, reading in found]
        not_proven = [(proof, reading) for proof, reading in found if not proof.may_run]
        unproven = (previous.unproven if previous else 0) + 1 if not_proven else 0
        failed = any(proof.failures for proof in proofs)
        told += self.bisect.explain_layers(adapter_name(version), adapter) if failed else []
        if failed or unproven > self.max_unproven:
            self._keep_evidence(version, {**_evidence(not_proven), "explained": told})
        check_proofs(proofs, told)
        if unproven > self.max_unproven:
            check_unproven(proofs, unproven)
        return Publication(adapter, tuple(proofs), tuple(readings), unproven)

    def _prove(
        self, adapter: AdapterFiles, expected: str, scores: tuple[Scored, Scored], pair: tuple[Copy, Reading | None]
    ) -> tuple[Proof, Reading]:
        copy, previous = pair
        name, limits = adapter_name(adapter.version), Limits(self.change_limit, self.base_limit)
        return prove(adapter, name, copy, scores, self.canary_T, limits=limits, previous=previous, expected=expected)

    def _keep_evidence(self, version: int, evidence: Mapping[str, Any]) -> None:
        key = f"parity/publish-v{version}-e{self.execution.number:06d}.json"
        self.store.put(key, json.dumps(evidence, indent=1).encode())


def _begun(call: Callable[[], None]) -> Future[None]:
    """Runs the call in a thread that may be abandoned if the caller fails: the engine's end ends the call as well."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="orbit-load")
    begun = pool.submit(call)
    pool.shutdown(wait=False)
    return begun


def adapter_facts(
    adapter: AdapterFiles, canary_T: Sequence[int], scores: tuple[Scored, Scored], base_weights: str
) -> dict[str, Any]:
    """Facts stored with an adapter: the base it is for, and what `serve` needs to repeat the effect check without a
    trainer. Args: scores: scores of the canary, with the adapter and without."""
    adapted, base = scores
    canary = {"token_ids": canary_T, "logprobs": adapted.logprobs_T, "base_logprobs": base.logprobs_T}
    of_base = {"weights": base_weights}
    return {"version": adapter.version, "digest": adapter.digest, "base": of_base, "canary": canary}


def write_adapter_bundle(store: Store, execution: Execution, adapter: AdapterFiles, facts: Mapping[str, Any]) -> None:
    """Writes `adapters/policy-v…/`, with PEFT's file names."""
    assert adapter.pieces is not None
    if isinstance(adapter.files, StoredFiles):
        parts = {name: standing_content(part) for name, part in adapter.files.parts.items()}
    else:
        parts = {name: _content(data, adapter.pieces[name]) for name, data in adapter.files.items()}
    told = {**facts, "run": execution.record.run}
    write_bundle(store, execution, f"{ADAPTERS}{adapter_name(adapter.version)}", parts, told, plain_names=True)


def write_model_bundle(
    store: Store, execution: Execution, model: AdapterFiles, beside: Mapping[str, bytes], facts: Mapping[str, Any]
) -> None:
    """Writes `models/policy-v…/`, which transformers loads. Args: beside: its other files (`whole_files`)."""
    assert model.pieces is not None
    parts = {name: _content(data, model.pieces[name]) for name, data in model.files.items()}
    write_bundle(
        store, execution, f"{MODELS}{adapter_name(model.version)}", {**parts, **beside}, facts, plain_names=True
    )


def whole_files(folder: Path) -> dict[str, bytes]:
    """The files of a model folder other than weights, adjusted for a BF16 model of the same structure."""
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    config = json.loads(files["config.json"])
    for name in ("dtype", "torch_dtype"):
        if name in config:
            config[name] = "bfloat16"
    return {**files, "config.json": json.dumps(config, indent=2).encode()}


def _content(data: Buffer, pieces: Pieces) -> Content:
    """A file in memory that was hashed when it was made."""
    return Content(memoryview(data).nbytes, lambda: split(data, pieces), pieces)


def _evidence(failed: Sequence[tuple[Proof, Reading]]) -> dict[str, Any]:
    """Numbers of the first failed copy, with those of the other failed copies under `others`."""
    told = [
        proof.to_json() | {"trainer_logprobs": reading.trainer_T, "engine_logprobs": reading.engine_T}
        for proof, reading in failed
    ]
    return told[0] | {"others": told[1:]}


@dataclass
class PolicyVersions:
    """Not thread-safe. A version is added proven, activated, and unloaded when its successor is activated."""

    engine: Engine
    _active: Publication | None = field(default=None)

    @property
    def active(self) -> Publication:
        if self._active is None:
            raise GateError("no policy version was published yet", where="publish")
        return self._active

    def activate(self, publication: Publication) -> None:
        """Activates a version and unloads its predecessor, from which nothing may be sampling.

        Raises:
            GateError: it is not newer than the active one. A policy never goes back.
        """
        before, version = self._active, publication.adapter.version
        if before is not None and version <= before.adapter.version:
            raise GateError(
                f"version {version} would replace {before.adapter.version}: versions only grow", where="publish"
            )
        # Switch before unloading: a version whose slot could not be freed is not sampled from either.
        self._active = publication
        if before is not None:
            self.engine.unload_adapter(before.name)


_log = logging.getLogger("orbit.loop")


class BackgroundWriter:
    """Runs work in order in one thread, beside the loop.

    Consumes: the adapter of a publish, then the checkpoint of its step. Waits for: nothing but the store. Unblocks: the
    loop, which waits for it before it publishes again, and the trainer, which does not change state that is still being
    read. Produces: bundles. A step is therefore durable before the step after the next begins, and the store sees the
    same objects in the same order as if the loop had written them itself.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="orbit-writer")
        self._pending: list[Future[None]] = []
        self._has_failed = False

    def submit(self, work: Callable[[], object]) -> Future[None]:
        """Queues work of one step at a time: an adapter and a checkpoint. After a failure no more work is done."""
        assert len(self._pending) < 2, "the step before is not durable yet"
        self._pending.append(self._pool.submit(self._carry_out, work))
        return self._pending[-1]

    def wait(self) -> None:
        """Waits until everything is durable. Raises the first error, once."""
        pending, self._pending = self._pending, []
        errors = [error for each in pending if (error := each.exception())]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Finishes pending work. Safe to call twice."""
        self._pool.shutdown()
        for each in self._pending:
            if error := each.exception():
                _log.warning("results of the run's last step were not saved: %s", error)
        self._pending = []

    def _carry_out(self, work: Callable[[], object]) -> None:
        if self._has_failed:
            return
        try:
            work()
        except BaseException:
            self._has_failed = True
            raise
