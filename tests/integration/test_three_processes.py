"""Trainer, inference and orchestrator apart: the same adapters as one process, whoever is lost and whenever."""

from __future__ import annotations

from pathlib import Path

import pytest

from orbit_runtime.loop.run import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import open_store
from tests.integration.killing import adapter_digests, demanding_manifest, small_manifest
from tests.integration.three_processes import run_apart, two_sides


@pytest.mark.parametrize("name", ["small", "LoRA with dropout", "MXFP4, PPO with KL"])
def test_three_processes_have_the_bits_of_one(tmp_path: Path, name: str) -> None:
    asked = small_manifest(steps=3) if name == "small" else demanding_manifest(name, steps=2)
    run(OrbitRun.model_validate(asked), out=str(tmp_path / "one"), progress=SilentProgress())
    with two_sides(asked) as sides:
        result = run_apart(asked, tmp_path / "three", sides)
    assert result.ended == "done"
    one, three = (adapter_digests(open_store(str(tmp_path / each))) for each in ("one", "three"))
    assert three == one
