"""Operators as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.bed.processes import WITH_ITS_PARENT
from cluster.by_hand import ROOT, Team
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
        crashing = any(name.startswith("ORBIT_TEST_") for name in environment)
        self.process = Forked(log, {**build_environment(team), **environment}, crashing=crashing)

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


def build_environment(team: Team) -> dict[str, str]:
    """Of an operator that acts in the team's namespace alone."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ORBIT_")}
    return {
        **inherited,
        "KUBECONFIG": team.server.kubeconfig,
        "ORBIT_OPERATOR_NAMESPACES": team.namespace,
        "ORBIT_OPERATOR_NAMESPACE": team.namespace,
        **FAST,
    }


def check_out(commit: str, folder: Path) -> Path | None:
    """The tree of an earlier commit, or `None` where this checkout does not have it."""
    folder.mkdir()
    archive = subprocess.run(["git", "-C", ROOT, "archive", commit], capture_output=True)
    if archive.returncode != 0:
        return None
    subprocess.run(["tar", "--extract", "--directory", folder], input=archive.stdout, check=True)
    return folder


@contextmanager
def run_earlier_operator(team: Team, log: Path, tree: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The operator of another tree, until SIGTERM has ended it."""
    environment = {**build_environment(team), "PYTHONPATH": f"{tree / 'operator'}{os.pathsep}{tree}"}
    command = [*WITH_ITS_PARENT, sys.executable, "-m", "orbit_operator"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=tree, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(25)


@contextmanager
def run_operator(team: Team, log: Path, **environment: str) -> Iterator[Operator]:
    operator = Operator(team, log, **environment)
    try:
        yield operator
    finally:
        if operator.process.poll() is None:
            operator.kill()
