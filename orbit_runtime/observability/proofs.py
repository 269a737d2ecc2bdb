"""A publish's proof for readers: what was checked, and the results.

Belongs here: one line for each stored adapter. Does not belong here: the checks (`parity.liveness`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orbit_runtime.observability.run_folder import RunFolder

NOT_KEPT = "not kept"
EQUAL, DIFFERENT, NOT_READ = "equal", "different", "not readable"


@dataclass(frozen=True, slots=True)
class ProofLine:
    """One adapter and its proof. A check that was not made, or whose number was not stored, is None."""

    version: Any
    digest: str | None
    verdict: str
    """`proven`, `whole`, `unproven`, `failed` or `not kept`."""
    engine_bytes: str | None
    """Comparison of the adapter's bytes in the engine's slot with the published bytes."""
    layers_bytes: str | None
    """Comparison of what the layers of both sides applied with what the bytes require."""
    error: float | None
    """Largest difference between the two sides' changes on the canary, in nats per token."""
    limit: float | None
    change: float | None
    """Largest change of a token by the adapter, the scale for `error`."""
    effect: float | None
    """Share of the adapter's effect that the engine shows."""
    top1: float | None
    base_error: float | None
    """Mean difference between the two sides without the adapter."""
    said: tuple[str, ...]
    """Messages: what failed, and what the engine's noise hides."""


def proof_lines(folder: RunFolder) -> list[ProofLine]:
    """Newest first."""
    kept = {
        checkpoint["facts"].get("policy_version"): checkpoint["facts"].get("proof")
        for checkpoint in folder.checkpoints
        if isinstance(checkpoint.get("facts"), Mapping)
    }
    lines = []
    for adapter in folder.adapters:
        facts = adapter.get("facts", {})
        proof = facts.get("proof") or kept.get(facts.get("version"))
        lines.append(_line(facts.get("version"), facts.get("digest"), proof if isinstance(proof, Mapping) else None))
    return lines


def _line(version: Any, digest: Any, proof: Mapping[str, Any] | None) -> ProofLine:
    told = proof or {}
    effect = told.get("effect")
    return ProofLine(
        version=version,
        digest=None if digest is None else str(digest),
        verdict=NOT_KEPT
        if proof is None
        else str(told.get("verdict") or ("proven" if told.get("proven") else "failed")),
        engine_bytes=_slot(told),
        layers_bytes=_layers(told),
        error=_number(told.get("change_error")),
        limit=_number(told.get("change_limit")),
        change=_number(told.get("change_from_base")),
        effect=_number(effect.get("scale")) if isinstance(effect, Mapping) else None,
        top1=_number(told.get("top1")),
        base_error=_number(told.get("base_error")),
        said=tuple(str(each) for name in ("failures", "unresolved") for each in told.get(name) or ()),
    )


def _slot(proof: Mapping[str, Any]) -> str | None:
    if "digest" not in proof:
        return None
    if proof.get("slot_digest") is None:
        return NOT_READ
    return EQUAL if proof["slot_digest"] == proof["digest"] else DIFFERENT


def _layers(proof: Mapping[str, Any]) -> str | None:
    expected = proof.get("expected_applied_digest")
    if expected is None:
        return None
    sides = [side for name in ("applied_digest", "trainer_applied_digest") if (side := proof.get(name)) is not None]
    return EQUAL if all(side == expected for side in sides) else DIFFERENT


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
