"""One publish: bytes to the store, bytes to the engine, proof, and only then the new name.

Belongs here: the order of these acts. Does not belong here: what the proof checks (`parity.liveness`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orbit_runtime.errors import GateError, OrbitError
from orbit_runtime.parity.liveness import Proof, Reading, check_proof, prove
from orbit_runtime.storage import Execution, Store, write_bundle
from orbit_runtime.types import AdapterFiles, Engine, Trainer


def adapter_name(version: int) -> str:
    return f"policy-v{version}"


@dataclass(frozen=True)
class Publication:
    """What stands in the engine now, with its evidence."""

    adapter: AdapterFiles
    proof: Proof
    reading: Reading

    @property
    def name(self) -> str:
        return adapter_name(self.adapter.version)


@dataclass(frozen=True)
class Publisher:
    """The two sides and the canary; the same for a whole run."""

    store: Store
    execution: Execution
    engine: Engine
    trainer: Trainer
    canary_T: tuple[int, ...]
    change_limit: float
    base_weights: str
    """Digest of the base's files; it travels with the adapter, which is good for no other base."""

    def publish(self, version: int, previous: Publication | None) -> Publication:
        """Publishes the trainer's adapter as `policy-v{version}` and retires `previous`.

        The engine is filled from the published bytes, never from the trainer's tensors.

        Raises:
            GateError: a check failed; the evidence is stored and `previous` still stands.
        """
        adapter = self.trainer.publishable(version)
        adapted, base = self.trainer.score(self.canary_T)
        # What `serve` needs to repeat the effect check with no trainer.
        canary = {"token_ids": self.canary_T, "logprobs": adapted.logprobs_T, "base_logprobs": base.logprobs_T}
        base = {"weights": self.base_weights}
        facts = {"version": version, "digest": adapter.digest, "base": base, "canary": canary}
        write_bundle(
            self.store, self.execution, f"adapters/{adapter_name(version)}", adapter.files, facts, plain_names=True
        )
        try:
            self.engine.load_adapter(adapter_name(version), adapter)
        except OrbitError as error:
            self._keep_evidence(version, {"version": version, "proven": False, "failures": [str(error)]})
            raise GateError(
                f"policy version {version} could not be proven live: the engine did not load it: {error}",
                where="publish",
            ) from error
        proof, reading = prove(
            adapter,
            adapter_name(version),
            self.engine,
            (adapted, base),
            self.canary_T,
            change_limit=self.change_limit,
            previous=previous.reading if previous else None,
        )
        if not proof.proven:
            logprobs = {"trainer_logprobs": reading.trainer_T, "engine_logprobs": reading.engine_T}
            self._keep_evidence(version, proof.to_json() | logprobs)
        check_proof(proof)
        if previous is not None:
            self.engine.unload_adapter(previous.name)
        return Publication(adapter, proof, reading)

    def _keep_evidence(self, version: int, evidence: Mapping[str, Any]) -> None:
        key = f"parity/publish-v{version}-e{self.execution.number:06d}.json"
        self.store.put(key, json.dumps(evidence, indent=1).encode())
