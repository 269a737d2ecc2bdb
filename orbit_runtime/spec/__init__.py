"""What a run is: the manifest, its loading, and the decisions that `Auto` leaves open. Never loads torch."""

from __future__ import annotations

from orbit_runtime.spec.run import OrbitRun

__all__ = ["OrbitRun"]
