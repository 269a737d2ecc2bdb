"""What several files of this folder start from: a process that runs whole runs, and a trained run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orbit_runtime.loop import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import OrbitRun
from tests.integration.killing import small_manifest
from tests.integration.run_launcher import RunLauncher


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose policy answers otherwise than its base."""
    folder = tmp_path_factory.mktemp("run")
    manifest = small_manifest(steps=2)
    manifest["spec"]["training"]["learningRate"] = 0.05
    run(OrbitRun.model_validate(manifest), out=str(folder), progress=SilentProgress())
    return folder


@pytest.fixture(scope="session")
def launcher() -> Iterator[RunLauncher]:
    made = RunLauncher()
    yield made
    made.close()
