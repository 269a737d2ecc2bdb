"""Operators as processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.by_hand import Team
from cluster.operator_launcher import Forked

FAST = {
    "ORBIT_OPERATOR_IDENTITY": "the-operator",
    "ORBIT_OPERATOR_HEALTH_PORT": "0",
    "ORBIT_OPERATOR_METRICS_PORT": "0",
    "ORBIT_OPERATOR_POLL_SECONDS": "60",
    # A busy machine's API server has answered nothing for 20 s; of losing the Lease a test of its own tells.
    "ORBIT_OPERATOR_LEASE_SECONDS": "120",
}


class Operator:
    """One process. Its output goes to a file, which `text` reads."""

    def __init__(self, team: Team, log: Path, **environment: str) -> None:
        self.log = log
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ORBIT_")}
        mine = {
            "KUBECONFIG": team.server.kubeconfig,
            "ORBIT_OPERATOR_NAMESPACES": team.namespace,
            "ORBIT_OPERATOR_NAMESPACE": team.namespace,
            **FAST,
        }
        crashing = any(name.startswith("ORBIT_TEST_") for name in environment)
        self.process = Forked(log, {**inherited, **mine, **environment}, crashing=crashing)

    @property
    def text(self) -> str:
        """What it has logged so far."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(25)


@contextmanager
def run_operator(team: Team, log: Path, **environment: str) -> Iterator[Operator]:
    operator = Operator(team, log, **environment)
    try:
        yield operator
    finally:
        if operator.process.poll() is None:
            operator.kill()
