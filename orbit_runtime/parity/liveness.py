"""The proof at every publish: the adapter that was trained is the adapter that samples, on every copy of the engine.

Belongs here: the checks of one publish on one copy, and their evidence.
Does not belong here: storing and loading the adapter (`loop.publish`).

1. Bytes. The digest recomputed from the engine's slot equals the published one, and so does the digest of the tensors
   that the engine's layers multiplied by while they scored the canary. Neither depends on the size of a fault. A copy
   that cannot read its slots back skips this check, and the proof says so.
2. Effect. On the canary, the *change* that the adapter makes (log-probs with it minus without) agrees between trainer
   and engine, token by token within the noise, and as a whole (`effect`): none of it, all of it and twice as much can
   be told apart. Comparing changes rather than log-probs cancels the difference between the two sides' base passes.
3. Novelty. A version whose bytes differ from its predecessor's is loaded under a different digest, and the engine's
   canary moved as the trainer's did since the newest version that was told apart from all earlier ones.
4. Base. With no adapter the engine gives the trainer's log-probs within the precision's limit, and also its own from
   the previous publish: a base is frozen.
5. Cache. Versions share no keys and values: for a new version nothing of the canary is in the engine's cache, and for
   the base, the log-probs after the canary's cached beginning equal those computed anew.
6. Predecessor. The version that sampled until this publish is still as it was proven.

A publish has *failed* if a check failed. If bytes are read back, it is *proven* otherwise. If not, checks 2 and 3 carry
the proof, and the strongest result is that the adapter holds as a *whole*: all of its effect is there, the effect is
this version's, and the remaining difference can be noise. Only the bytes reveal a fault in one part of it that is
smaller than the noise. A publish is *unproven* if the noise hides even the whole, or grew so much that the base may
have changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from orbit_runtime.adapters.files import expected_applied_digest
from orbit_runtime.errors import GateError
from orbit_runtime.parity.effect import LARGEST_IN_NOISE, Effect, noise_of, unexplained, weigh
from orbit_runtime.parity.statistics import top1_agreement
from orbit_runtime.types import AdapterFiles, Copy, Scored

CHANGE_LIMITS = {"float32": 1e-3, "bfloat16": 0.5}
"""By `rounded_to`: the largest difference of one adapter's effect on one token between two orders of summation, if the
engine's noise on the canary is no larger than that.

Healthy publishes stay below half of it: 500 each; the worst in BF16 were 0.19 with LoRA and 0.14 with OFT, and of 120
in FP32 with activations in FP8 or NVFP4 0.07 and 0.16. What a pretrained model of 135 million parameters samples
differs on one token by 0.20 from what its trainer scores, in BF16. Smaller faults are found by the digests, which do
not depend on size, and by the canary's tokens taken together.
"""


QUIET = 100.0
"""The noise of a change is at least the precision's limit divided by this: two base passes can be equal to the bit even
if passes with an adapter are not."""
GROWTH = 2.0
"""Largest factor by which the noise may grow over that of the previous publish."""
Verdict = Literal["proven", "whole", "unproven", "failed"]
CACHED_TAIL = 6
"""Tokens at the end of the canary that are computed after its cached beginning."""


@dataclass(frozen=True)
class Limits:
    """Limits of one precision."""

    change: float
    """0: both sides give the same bits, so that nothing is noise."""
    base: float = math.inf
    """Limit of the mean |d| with no adapter; infinite if differences are only reported."""


@dataclass(frozen=True)
class Reading:
    """What one publish measured on the canary; the next publish compares itself with it."""

    name: str
    adapter: AdapterFiles
    digest: str | None
    """Digest of the slot, as read back."""
    trainer_T: tuple[float, ...]
    engine_T: tuple[float, ...]
    base_T: tuple[float, ...]
    """The engine's log-probs with no adapter."""
    noise: float
    """See the publish's `Proof`."""
    apart: Reading | None = None
    """The newest earlier version told apart from its predecessors; None if this one was, or is the first."""


@dataclass(frozen=True)
class Proof:
    """Evidence of one publish on one copy. `failures` is empty if every check passed."""

    version: int
    engine: str
    """Name of the copy."""
    digest: str
    slot_digest: str | None
    """None if this copy cannot read its slots back, so that the proof rests on log-probs."""
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
    """max over the canary of the engine's base change since the previous publish."""
    cached_error: float | None
    """max over the canary's end of |after a cached beginning - computed anew|; None if nothing came from a cache."""
    noise: float
    """Noise of a change per token, in nat: the difference between the two sides where they should be equal."""
    effect: Effect | None
    """How much of the adapter's effect the engine shows; None if the adapter has none."""
    novelty: Effect | None
    """The same for the change since the newest version that was told apart; None if there is none, or none is due."""
    unexplained: float
    """Difference of the two changes relative to what noise can explain; above 1, part of the effect is wrong."""
    top1: float | None
    """Share of canary positions where both sides' most probable token agrees; None if a side does not report it."""
    reads_back: bool
    """Whether the copy returned its bytes."""
    failures: tuple[str, ...]
    unresolved: tuple[str, ...]
    """What the noise hides, if only log-probs could reveal it."""

    @property
    def verdict(self) -> Verdict:
        if self.failures:
            return "failed"
        if self.unresolved:
            return "unproven"
        return "proven" if self.reads_back else "whole"

    @property
    def proven(self) -> bool:
        return self.verdict == "proven"

    @property
    def may_run(self) -> bool:
        """Whether it is proven as far as this copy allows."""
        return self.verdict in ("proven", "whole")

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"proven": self.proven, "verdict": self.verdict}


def prove(
    published: AdapterFiles,
    name: str,
    engine: Copy,
    trainer_scores: tuple[Scored, Scored] | None,
    canary_T: Sequence[int],
    *,
    limits: Limits,
    previous: Reading | None,
    expected: str | None = None,
) -> tuple[Proof, Reading]:
    """Runs the checks; measures even after a failed check, so that the evidence is complete.

    Args:
        trainer_scores: the trainer's readings of the canary, with and without the adapter; None if digests prove it.
        previous: the previous reading of the same copy.
        expected: digest of the tensors that layers must have applied; None to compute it here.
    """
    start = max(1, len(canary_T) - CACHED_TAIL)
    expected = expected or expected_applied_digest(published.files, published.pieces)
    standing = [previous.name] if previous else []
    adapted, base = engine.score(canary_T, [name, None], prefix_length=start, standing=standing)
    trainer_adapted, trainer_base = trainer_scores or (replace(adapted, applied_digest=expected), base)
    slot_digest = engine.adapter_digest(name)
    trainer_change, change = _change(trainer_adapted, trainer_base), _change(adapted, base)
    error = _distance(change, trainer_change)
    measured = _noise(trainer_base, base, previous, start, least=limits.change / QUIET)
    noise = measured if previous is None else min(measured, GROWTH * previous.noise)
    change_limit = max(limits.change, LARGEST_IN_NOISE * noise) if limits.change else 0.0
    seen = trainer_adapted.logprobs_T, adapted.logprobs_T, base.logprobs_T
    reading = Reading(name, published, slot_digest, *seen, noise)
    effect, effect_said = _weigh_effect(trainer_change, change, noise)
    novelty, novelty_said = _weigh_novelty(reading, previous, noise)
    left = unexplained(trainer_change, change, noise)
    if novelty is not None and not novelty.is_resolved:
        reading = replace(reading, apart=_told_apart(previous))
    moved = None if previous is None else _distance(reading.trainer_T, previous.trainer_T)
    base_error = _mean_distance(trainer_base.logprobs_T, base.logprobs_T)
    base_moved = None if previous is None else _distance(base.logprobs_T, previous.base_T)
    cached = _cached_error(start, (adapted, base))
    failures = _bytes_failures(published, name, engine, slot_digest, adapted, expected)
    if trainer_adapted.applied_digest != expected:
        failures.append(
            f"the trainer's layers applied {str(trainer_adapted.applied_digest)[:19]}…, expected {expected[:19]}…"
        )
    failures += _difference_failures(error, base_error, Limits(change_limit, limits.base))
    failures += _cache_failures(name, adapted, cached, change_limit)
    unresolved = [_grown(measured, noise)] if measured > noise > 0 else []
    if not engine.reads_back:
        failures += [*effect_said.failures, *novelty_said.failures, *_unexplained_failures(left, noise)]
        unresolved += [*effect_said.unresolved, *novelty_said.unresolved]
    if previous is not None and moved is not None and base_moved is not None:
        failures += _novelty_failures(published, reading, previous, moved, change_limit)
        failures += _base_failures(base_moved, change_limit)
        failures += _predecessor_failures(engine, canary_T, previous, change_limit)
    proof = Proof(
        version=published.version,
        engine=engine.name,
        digest=published.digest,
        slot_digest=slot_digest,
        applied_digest=adapted.applied_digest,
        expected_applied_digest=expected,
        trainer_applied_digest=trainer_adapted.applied_digest,
        change_error=error,
        change_limit=change_limit,
        change_from_base=_distance(trainer_change, [0.0] * len(trainer_change)),
        change_from_previous=moved,
        base_error=base_error,
        base_moved=base_moved,
        cached_error=cached,
        noise=noise,
        effect=effect,
        novelty=novelty,
        unexplained=left,
        top1=top1_agreement(trainer_adapted.top_T and trainer_adapted.top_T[1:], adapted.top_T and adapted.top_T[1:]),
        reads_back=engine.reads_back,
        failures=tuple(failures),
        unresolved=tuple(unresolved),
    )
    return proof, reading


def check_proofs(proofs: Sequence[Proof], told: Sequence[str] = ()) -> None:
    """Raises GateError (84) listing every check that failed, and the copy if there are several.

    Args:
        told: findings from a closer look at the two sides.
    """
    failures = [
        f"{proof.engine}: {failure}" if len(proofs) > 1 else failure for proof in proofs for failure in proof.failures
    ]
    if failures:
        raise GateError(
            f"policy version {proofs[0].version} could not be proven live: " + "; ".join([*failures, *told]),
            where="publish",
            fix="the run stopped before a token was sampled from it; the evidence is in parity/ of the run folder",
        )


def check_unproven(proofs: Sequence[Proof], in_a_row: int) -> None:
    """Raises GateError (84): for `in_a_row` publishes noise hid whether the engine samples from the trained policy."""
    reasons = dict.fromkeys(reason for proof in proofs for reason in proof.unresolved)
    raise GateError(
        f"{in_a_row} publishes in a row could not be proven live, the last as policy version {proofs[0].version}: "
        + "; ".join(reasons),
        where="spec.parity.maxUnproven",
        fix="let the servers run Orbit's plug-in, which reads their slots back (docs/guides/sglang.md); or raise it, "
        "and accept unproven publishes for longer",
    )


@dataclass(frozen=True)
class _Said:
    failures: tuple[str, ...] = ()
    unresolved: tuple[str, ...] = ()


def _noise(trainer_base: Scored, base: Scored, previous: Reading | None, start: int, *, least: float) -> float:
    """Noise of this engine: differences of its base readings from the trainer's, from its own of the previous publish,
    and from its own after a cached prefix, which is another batch. All of these should be 0.

    A fault can cause such differences too, and must not become noise that hides it: noise grows slowly (`GROWTH`).
    """
    differences = [_differences(trainer_base.logprobs_T[1:], base.logprobs_T[1:])]
    if previous is not None:
        differences.append(_differences(base.logprobs_T[1:], previous.base_T[1:]))
    if base.cached is not None and base.cached.tokens:
        differences.append(_differences(base.cached.logprobs_T, base.logprobs_T[start + 1 :]))
    return max(least, noise_of(*differences))


def _grown(measured: float, noise: float) -> str:
    return (
        f"with no adapter the engine's log-probs of the canary are {measured / noise:.1f} times as far off as the "
        f"noise can have grown since the previous publish ({noise:.2g} nat): its base may have changed"
    )


def _unexplained_failures(left: float, noise: float) -> list[str]:
    if left <= 1.0:
        return []
    return [
        f"token by token the adapter's effect on the canary differs from the trainer's by {left:.2f} times what "
        f"noise of {noise:.2g} nat can cause: a part of it is missing or wrong"
    ]


def _weigh_effect(expected_T: Sequence[float], found_T: Sequence[float], noise: float) -> tuple[Effect | None, _Said]:
    if not any(expected_T):
        # The identity: applying it makes no difference. If the engine shows one, `error` reveals it.
        return None, _Said()
    return _weigh(
        expected_T,
        found_T,
        noise,
        small="the adapter's effect on the canary is too small for this engine's noise of {noise:.2g} nat per token",
        another="the engine shows {effect.scale:.2f} times the adapter's effect on the canary, not 1.00 within "
        "{effect.margin:.2f}: it is not applied (0), scaled differently, or another adapter's",
    )


def _weigh_novelty(reading: Reading, previous: Reading | None, noise: float) -> tuple[Effect | None, _Said]:
    before = _told_apart(previous)
    if before is None or before.adapter.digest == reading.adapter.digest:
        return None, _Said()
    expected = _differences(reading.trainer_T, before.trainer_T)
    if not any(expected):
        # Other bytes without any effect: on the canary both versions are the same policy.
        return None, _Said(unresolved=(f"on the canary it makes no difference whether {before.name} samples",))
    return _weigh(
        expected,
        _differences(reading.engine_T, before.engine_T),
        noise,
        small=f"since {before.name} the adapter's effect moved too little for this engine's noise of {{noise:.2g}} nat",
        another=f"since {before.name} the engine's canary moved {{effect.scale:.2f}} times as much as the trainer's, "
        "not 1.00 within {effect.margin:.2f}: it still samples from an older version (0), or from another one",
    )


def _weigh(
    expected_T: Sequence[float], found_T: Sequence[float], noise: float, *, small: str, another: str
) -> tuple[Effect, _Said]:
    """Args: small, another: message templates with placeholders for `noise` and `effect`."""
    effect = weigh(expected_T, found_T, noise)
    if not effect.is_resolved:
        return effect, _Said(unresolved=(small.format(noise=noise),))
    return effect, _Said() if effect.agrees else _Said(failures=(another.format(effect=effect),))


def _told_apart(previous: Reading | None) -> Reading | None:
    """The reading without its adapter's bytes, which can be gigabytes; this one may be many versions old."""
    if previous is None or previous.apart is not None:
        return previous and previous.apart
    return replace(previous, adapter=replace(previous.adapter, files={}, pieces=None, memory=None))


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
            f"the engine's slot holds {str(slot_digest)[:19]}…, the published digest is {published.digest[:19]}…{how}"
        )
    if adapted.applied_digest != expected:
        failures.append(f"the engine's layers applied {str(adapted.applied_digest)[:19]}…, expected {expected[:19]}…")
    return failures


def _difference_failures(error: float, base_error: float, limits: Limits) -> list[str]:
    """`not <=` throughout: a NaN must fail."""
    failures = []
    if not error <= limits.change:
        failures.append(
            f"the adapter's effect on the canary differs by {error:.3g} from the trainer's, limit {limits.change:.3g}"
        )
    if not base_error <= limits.base:
        failures.append(
            f"the engine serves another base: with no adapter its log-probs of the canary differ by {base_error:.3g} "
            f"per token from the trainer's, limit {limits.base:.3g}"
        )
    return failures


def _base_failures(moved: float, limit: float) -> list[str]:
    if moved <= limit:
        return []
    return [
        f"the engine's base differs from that of the previous publish: with no adapter its log-probs of the canary "
        f"moved by {moved:.3g}, limit {limit:.3g}"
    ]


def _cache_failures(name: str, adapted: Scored, cached: float | None, limit: float) -> list[str]:
    shared = "versions share cached keys and values: "
    failures = []
    if cached is not None and not cached <= limit:
        failures.append(
            f"{shared}after its cached prefix the canary's log-probs are {cached:.3g} from those computed anew, "
            f"limit {limit:.3g}"
        )
    if adapted.cached is not None and adapted.cached.tokens:
        found = adapted.cached.tokens
        failures.append(f"{shared}{found} tokens of the canary were in the engine's cache for {name}, which is new")
    return failures


def _novelty_failures(
    published: AdapterFiles, reading: Reading, previous: Reading, moved: float, limit: float
) -> list[str]:
    failures = []
    if reading.digest is not None and reading.digest == previous.digest and published.digest != previous.digest:
        failures.append("the engine still holds the previous version's bytes")
    engine_moved = _distance(reading.engine_T, previous.engine_T)
    if moved > 2 * limit and not engine_moved >= moved - 2 * limit:
        failures.append(
            f"the engine still samples from the previous version: the trainer's canary moved by {moved:.3g} since "
            f"then, the engine's by {engine_moved:.3g}"
        )
    return failures


def _predecessor_failures(engine: Copy, canary_T: Sequence[int], previous: Reading, limit: float) -> list[str]:
    """The version that sampled until now must still be as it was proven: engines drop adapters on their own."""
    gone = f"{previous.name}, which sampled until now, is no longer as it was proven"
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
    """Earlier publishes left the canary's beginning in the engine's cache, under their own names and the base's."""
    errors = []
    for scored in readings:
        if scored.cached is not None and scored.cached.tokens:
            errors.append(_distance(scored.cached.logprobs_T, scored.logprobs_T[start + 1 :]))
    if not errors:
        return None
    return math.nan if any(math.isnan(error) for error in errors) else max(errors)


def _change(with_adapter: Scored, without: Scored) -> list[float]:
    return _differences(with_adapter.logprobs_T, without.logprobs_T)


def _differences(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """NaN if either side is, never hidden by `max`."""
    distances = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return math.nan if any(math.isnan(x) for x in distances) else max(distances, default=0.0)


def _mean_distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Mean over every token after the first."""
    return sum(abs(x - y) for x, y in zip(a[1:], b[1:], strict=True)) / max(1, len(a) - 1)
