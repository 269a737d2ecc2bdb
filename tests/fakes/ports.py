"""A port that was free a moment ago, for tests whose servers listen at once."""

from __future__ import annotations

from orbit_runtime.workers.system import HeldPort


def free_port() -> int:
    with HeldPort() as port:
        return port
