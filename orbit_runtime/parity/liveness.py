"""The proof at every publish: the adapter that was trained is the adapter that samples, on every copy of the engine.

Belongs here: the checks of one publish on one copy, and their evidence.
Does not belong here: storing and loading the adapter (`loop.publish`).

1. Bytes. The digest recomputed from the engine's slot equals the published one, and so does the digest of the tensors
   that the engine's layers multiplied by while they scored the canary. Neither depends on how large a fault is. A copy
   that cannot read its slots back goes without this check, and the proof says so.
2. Effect. On the canary, the *change* the adapter makes (log-probs with it minus without) agrees between trainer and
   engine. Comparing changes rather than log-probs cancels what the two sides' base passes differ by.
3. Novelty. A version whose bytes differ from its predecessor's stands under another digest than its predecessor, and
   where the trainer's canary moved by more than the limit, the engine's moved too.
4. Base. With no adapter the engine gives the trainer's log-probs within the precision's limit, and its own of the
   publish before: a base is frozen.
5. Cache. Behind a beginning that came from the engine's cache, the canary's log-probs are those computed anew: no keys
   and values are shared between versions. What is there comes from earlier publishes: the base's own, and nothing of a
   version that is new.
6. Until now. The version that sampled until this publish still stands as it was proven.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orbit_runtime.adapters.state import expected_applied_digest
from orbit_runtime.errors import GateError
from orbit_runtime.types import AdapterFiles, Copy, Scored

CHANGE_LIMITS = {"float32": 1e-3, "bfloat16": 0.25}
"""By compute dtype: how far one adapter's effect on a log-prob may differ between two orders of summation.

The first is measured: 500 healthy publishes stay below half of it. The second is an estimate, not run on hardware.
Faults smaller than this are found by the digests, which know no size.
"""


CACHED_TAIL = 6
"""Tokens at the canary's end that are computed behind its cached beginning."""


@dataclass(frozen=True)
class Limits:
    """Of one precision."""

    change: float
    base: float = math.inf
    """Of the mean |d| with no adapter; infinite where differences are only reported."""


@dataclass(frozen=True)
class Reading:
    """What one publish measured on the canary; the next publish compares itself with it."""

    name: str
    adapter: AdapterFiles
    digest: str | None
    trainer_T: tuple[float, ...]
    engine_T: tuple[float, ...]
    base_T: tuple[float, ...]
    """The engine's, with no adapter."""


@dataclass(frozen=True)
class Proof:
    """Evidence of one publish on one copy. `failures` is empty where everything held."""

    version: int
    engine: str
    """Which copy."""
    digest: str
    slot_digest: str | None
    """None: this copy cannot read its slots back, and the proof rests on log-probs."""
    applied_digest: str | None
    expected_applied_digest: str
    trainer_applied_digest: str | None
    change_error: float
    """max over the canary of |engine's change - trainer's change|."""
    change_limit: float
    change_from_base: float
    """max over the canary of the trainer's |change|."""
    change_from_previous: float | None
    base_error: float
    """mean over the canary of |trainer - engine| with no adapter."""
    base_moved: float | None
    """max over the canary of how far the engine's base moved since the previous publish."""
    cached_error: float | None
    """max over the canary's end of |behind a cached beginning - computed anew|; None: nothing came from a cache."""
    failures: tuple[str, ...]

    @property
    def proven(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"proven": self.proven}


def prove(
    published: AdapterFiles,
    name: str,
    engine: Copy,
    trainer_scores: tuple[Scored, Scored],
    canary_T: Sequence[int],
    *,
    limits: Limits,
    previous: Reading | None,
    expected: str | None = None,
) -> tuple[Proof, Reading]:
    """Runs the checks; measures even where an earlier check failed, so that the evidence is whole.

    Args:
        trainer_scores: the trainer's own reading of the canary, with its adapter and without.
        previous: of the same copy.
        expected: digest of what layers must have applied; None: it is worked out here.
    """
    start = max(1, len(canary_T) - CACHED_TAIL)
    expected = expected or expected_applied_digest(published.files, published.pieces)
    standing = [previous.name] if previous else []
    adapted, base = engine.score(canary_T, [name, None], behind=start, standing=standing)
    trainer_adapted, trainer_base = trainer_scores
    slot_digest = engine.adapter_digest(name)
    trainer_change = _change(trainer_adapted, trainer_base)
    error = _distance(_change(adapted, base), trainer_change)
    reading = Reading(name, published, slot_digest, trainer_adapted.logprobs_T, adapted.logprobs_T, base.logprobs_T)
    moved = None if previous is None else _distance(reading.trainer_T, previous.trainer_T)
    base_error = _mean_distance(trainer_base.logprobs_T, base.logprobs_T)
    base_moved = None if previous is None else _distance(base.logprobs_T, previous.base_T)
    cached = _cached_error(start, (adapted, base))
    failures = _bytes_failures(published, name, engine, slot_digest, adapted, expected)
    if trainer_adapted.applied_digest != expected:
        failures.append(
            f"the trainer's layers applied {str(trainer_adapted.applied_digest)[:19]}…, expected {expected[:19]}…"
        )
    # `not <=`: a NaN must fail.
    if not error <= limits.change:
        failures.append(
            f"the adapter's effect on the canary differs by {error:.3g} from the trainer's, limit {limits.change:.3g}"
        )
    if not base_error <= limits.base:
        failures.append(
            f"the engine serves another base: with no adapter its log-probs of the canary differ by {base_error:.3g} "
            f"per token from the trainer's, limit {limits.base:.3g}"
        )
    if cached is not None and not cached <= limits.change:
        failures.append(
            f"versions share cached keys and values: behind its cached beginning the canary's log-probs are "
            f"{cached:.3g} from those computed anew, limit {limits.change:.3g}"
        )
    if previous is not None and moved is not None and base_moved is not None:
        failures += _novelty_failures(published, reading, previous, moved, limits.change)
        if not base_moved <= limits.change:
            failures.append(
                f"the engine's base is another one than at the previous publish: with no adapter its log-probs of the "
                f"canary moved by {base_moved:.3g}, limit {limits.change:.3g}"
            )
        failures += _predecessor_failures(engine, canary_T, previous, limits.change)
    proof = Proof(
        version=published.version,
        engine=engine.name,
        digest=published.digest,
        slot_digest=slot_digest,
        applied_digest=adapted.applied_digest,
        expected_applied_digest=expected,
        trainer_applied_digest=trainer_adapted.applied_digest,
        change_error=error,
        change_limit=limits.change,
        change_from_base=_distance(trainer_change, [0.0] * len(trainer_change)),
        change_from_previous=moved,
        base_error=base_error,
        base_moved=base_moved,
        cached_error=cached,
        failures=tuple(failures),
    )
    return proof, reading


def check_proofs(proofs: Sequence[Proof]) -> None:
    """Raises GateError (84) listing every check that failed, and on which copy where there are several."""
    failures = [
        f"{proof.engine}: {failure}" if len(proofs) > 1 else failure for proof in proofs for failure in proof.failures
    ]
    if failures:
        raise GateError(
            f"policy version {proofs[0].version} could not be proven live: " + "; ".join(failures),
            where="publish",
            fix="the run stopped before a token was sampled from it; the evidence is in parity/ of the run folder",
        )


def _bytes_failures(
    published: AdapterFiles, name: str, engine: Copy, slot_digest: str | None, adapted: Scored, expected: str
) -> list[str]:
    if not engine.reads_back:
        return []
    failures = []
    if slot_digest != published.digest:
        explained = engine.explain_slot(name, published)
        how = f": {explained}" if explained else ""
        failures.append(
            f"the engine's slot holds {str(slot_digest)[:19]}…, published was {published.digest[:19]}…{how}"
        )
    if adapted.applied_digest != expected:
        failures.append(f"the engine's layers applied {str(adapted.applied_digest)[:19]}…, expected {expected[:19]}…")
    return failures


def _novelty_failures(
    published: AdapterFiles, reading: Reading, previous: Reading, moved: float, limit: float
) -> list[str]:
    failures = []
    if reading.digest is not None and reading.digest == previous.digest and published.digest != previous.digest:
        failures.append("the engine still holds the previous version's bytes")
    engine_moved = _distance(reading.engine_T, previous.engine_T)
    if moved > 2 * limit and not engine_moved > moved - 2 * limit:
        failures.append(
            f"the engine still samples from the previous version: the trainer's canary moved by {moved:.3g} since "
            f"then, the engine's by {engine_moved:.3g}"
        )
    return failures


def _predecessor_failures(engine: Copy, canary_T: Sequence[int], previous: Reading, limit: float) -> list[str]:
    """What sampled until now must be what was proven then: engines drop adapters by themselves."""
    gone = f"{previous.name}, which sampled until now, no longer stands as it was proven"
    if engine.reads_back:
        if engine.adapter_digest(previous.name) == previous.digest:
            return []
        explained = engine.explain_slot(previous.name, previous.adapter)
        return [f"{gone}: {explained}" if explained else gone]
    try:
        (again,) = engine.score(canary_T, [previous.name])
    except GateError as error:
        return [f"{gone}: it was evicted, or unloaded by someone else ({error.message})"]
    moved = _distance(again.logprobs_T, previous.engine_T)
    return [] if moved <= limit else [f"{gone}: its log-probs of the canary moved by {moved:.3g}, limit {limit:.3g}"]


def _cached_error(start: int, readings: Sequence[Scored]) -> float | None:
    """Earlier publishes left the canary's beginning in the engine's cache, under their names and the base's."""
    errors = []
    for scored in readings:
        if scored.cached is not None and scored.cached.tokens:
            errors.append(_distance(scored.cached.logprobs_T, scored.logprobs_T[start + 1 :]))
    if not errors:
        return None
    return math.nan if any(math.isnan(error) for error in errors) else max(errors)


def _change(with_adapter: Scored, without: Scored) -> list[float]:
    return [a - b for a, b in zip(with_adapter.logprobs_T, without.logprobs_T, strict=True)]


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """NaN where either side is, never hidden by `max`."""
    distances = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return math.nan if any(math.isnan(x) for x in distances) else max(distances, default=0.0)


def _mean_distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Over every token after the first."""
    return sum(abs(x - y) for x, y in zip(a[1:], b[1:], strict=True)) / max(1, len(a) - 1)
