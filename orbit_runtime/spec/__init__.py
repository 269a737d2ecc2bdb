"""The manifest of a run, its loading, and the decisions that `Auto` leaves open. Never loads torch."""

from orbit_runtime.spec.load import load_manifest, parse_manifest
from orbit_runtime.spec.resolve import (
    FieldDifference,
    MachineFacts,
    Resolved,
    differences,
    identity_digest,
    identity_fields,
    keep_decisions,
    resolve,
)
from orbit_runtime.spec.run import OrbitRun

__all__ = [
    "FieldDifference",
    "MachineFacts",
    "OrbitRun",
    "Resolved",
    "differences",
    "identity_digest",
    "identity_fields",
    "keep_decisions",
    "load_manifest",
    "parse_manifest",
    "resolve",
]
