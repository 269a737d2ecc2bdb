"""The proof at every publish: the adapter that was trained is the adapter that samples.

Belongs here: the three checks of one publish on one engine, and their evidence.
Does not belong here: storing and loading the adapter (`loop.publish`).

1. Bytes. The digest recomputed from the engine's slot equals the published one, and so does the digest of the tensors
   that the engine's layers multiplied by while they scored the canary. Neither depends on how large a fault is.
2. Effect. On the canary, the *change* the adapter makes (log-probs with it minus without) agrees between trainer and
   engine. Comparing changes rather than log-probs cancels what the two sides' base passes differ by.
3. Novelty. A version whose bytes differ from its predecessor's stands under another digest than its predecessor, and
   where the trainer's canary moved by more than the limit, the engine's moved too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orbit_runtime.adapters.state import expected_applied_digest
from orbit_runtime.errors import GateError
from orbit_runtime.types import AdapterFiles, Engine, Scored

CHANGE_LIMITS = {"float32": 1e-3, "bfloat16": 0.25}
"""By compute dtype: how far one adapter's effect on a log-prob may differ between two orders of summation.

The first is measured: 500 healthy publishes stay below half of it. The second is an estimate, not run on hardware.
Faults smaller than this are found by the digests, which know no size.
"""


@dataclass(frozen=True)
class Reading:
    """What one publish measured on the canary; the next publish compares itself with it."""

    digest: str
    trainer_T: tuple[float, ...]
    engine_T: tuple[float, ...]


@dataclass(frozen=True)
class Proof:
    """Evidence of one publish. `failures` is empty where everything held."""

    version: int
    digest: str
    slot_digest: str
    applied_digest: str | None
    expected_applied_digest: str
    trainer_applied_digest: str | None
    change_error: float
    """max over the canary of |engine's change - trainer's change|."""
    change_limit: float
    change_from_base: float
    """max over the canary of the trainer's |change|."""
    change_from_previous: float | None
    failures: tuple[str, ...]

    @property
    def proven(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"proven": self.proven}


def prove(
    published: AdapterFiles,
    name: str,
    engine: Engine,
    trainer_scores: tuple[Scored, Scored],
    canary_T: Sequence[int],
    *,
    change_limit: float,
    previous: Reading | None,
) -> tuple[Proof, Reading]:
    """Runs the three checks; measures even where an earlier check failed, so that the evidence is whole.

    Args:
        trainer_scores: the trainer's own reading of the canary, with its adapter and without.
    """
    adapted, base = engine.score(canary_T, [name, None])
    trainer_adapted, trainer_base = trainer_scores
    slot_digest = engine.adapter_digest(name)
    expected = expected_applied_digest(published.files)
    engine_change = _change(adapted, base)
    trainer_change = _change(trainer_adapted, trainer_base)
    error = _distance(engine_change, trainer_change)
    reading = Reading(slot_digest, trainer_adapted.logprobs_T, adapted.logprobs_T)
    moved = None if previous is None else _distance(reading.trainer_T, previous.trainer_T)
    explained = engine.explain_slot(name, published) if slot_digest != published.digest else ""
    failures = _bytes_failures(published, (slot_digest, explained), adapted, trainer_adapted, expected)
    # `not <=`: a NaN must fail.
    if not error <= change_limit:
        failures.append(
            f"the adapter's effect on the canary differs by {error:.3g} from the trainer's, limit {change_limit:.3g}"
        )
    if previous is not None and moved is not None:
        failures += _novelty_failures(published, slot_digest, reading, previous, moved, change_limit)
    proof = Proof(
        version=published.version,
        digest=published.digest,
        slot_digest=slot_digest,
        applied_digest=adapted.applied_digest,
        expected_applied_digest=expected,
        trainer_applied_digest=trainer_adapted.applied_digest,
        change_error=error,
        change_limit=change_limit,
        change_from_base=_distance(trainer_change, [0.0] * len(trainer_change)),
        change_from_previous=moved,
        failures=tuple(failures),
    )
    return proof, reading


def check_proof(proof: Proof) -> None:
    """Raises GateError (84) listing every check that failed."""
    if proof.failures:
        raise GateError(
            f"policy version {proof.version} could not be proven live: " + "; ".join(proof.failures),
            where="publish",
            fix="the run stopped before a token was sampled from it; the evidence is in parity/ of the run folder",
        )


def _bytes_failures(
    published: AdapterFiles, slot: tuple[str, str], adapted: Scored, trainer_adapted: Scored, expected: str
) -> list[str]:
    failures = []
    slot_digest, explained = slot
    if slot_digest != published.digest:
        how = f": {explained}" if explained else ""
        failures.append(f"the engine's slot holds {slot_digest[:19]}…, published was {published.digest[:19]}…{how}")
    if adapted.applied_digest != expected:
        failures.append(f"the engine's layers applied {str(adapted.applied_digest)[:19]}…, expected {expected[:19]}…")
    if trainer_adapted.applied_digest != expected:
        failures.append(
            f"the trainer's layers applied {str(trainer_adapted.applied_digest)[:19]}…, expected {expected[:19]}…"
        )
    return failures


def _novelty_failures(
    published: AdapterFiles, slot_digest: str, reading: Reading, previous: Reading, moved: float, limit: float
) -> list[str]:
    failures = []
    if published.digest != previous.digest and slot_digest == previous.digest:
        failures.append("the engine still holds the previous version's bytes")
    engine_moved = _distance(reading.engine_T, previous.engine_T)
    if moved > 2 * limit and not engine_moved > moved - 2 * limit:
        failures.append(
            f"the trainer's canary moved by {moved:.3g} since the previous version, the engine's by {engine_moved:.3g}"
        )
    return failures


def _change(with_adapter: Scored, without: Scored) -> list[float]:
    return [a - b for a, b in zip(with_adapter.logprobs_T, without.logprobs_T, strict=True)]


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """NaN where either side is, never hidden by `max`."""
    distances = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return math.nan if any(math.isnan(x) for x in distances) else max(distances, default=0.0)
