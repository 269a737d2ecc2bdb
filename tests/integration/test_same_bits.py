"""The same bits, whatever else the machine does: two threads, and processes that take the cores away.

`tools/same_bits.py` does the same a hundred times; tests/models/test_determinism.py names the operation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.storage import open_store
from tests.integration.killing import adapter_digests, demanding_manifest
from tests.integration.load import ENVIRONMENT, busy_machine
from tests.integration.run_launcher import RunLauncher

STEPS, REPEATS = 2, 3


@pytest.fixture(scope="module")
def loaded() -> Iterator[RunLauncher]:
    """Runs with two threads on a machine that is busy."""
    made = RunLauncher(ENVIRONMENT)
    with busy_machine():
        yield made
    made.close()


def replay(out: Path, environment: dict[str, str]) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "orbit_runtime.cli.main", "replay", str(out), "--json"]
    ended = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    return ended.returncode, json.loads(ended.stdout)


@pytest.mark.long  # four processes that spin beside it take two thirds of what every other test would have
@pytest.mark.timeout(600)
def test_a_manifest_run_again_on_a_busy_machine_gives_the_same_adapter_after_every_step_and_replays(
    tmp_path: Path, loaded: RunLauncher
) -> None:
    manifest = demanding_manifest("LoRA with dropout", steps=STEPS)
    found = []
    for number in range(REPEATS):
        out = tmp_path / str(number)
        assert loaded.run(manifest, str(out)) == 0
        found.append(adapter_digests(open_store(str(out))))
    assert len(set(found[0])) == STEPS, "every step changed the adapter"
    assert found == [found[0]] * REPEATS
    (facts,) = json.loads((tmp_path / "0" / "run.json").read_text())["rounding"]
    assert facts["threads"] == ENVIRONMENT["OMP_NUM_THREADS"]
    code, replayed = replay(tmp_path / "0", ENVIRONMENT)
    assert (code, replayed["equal"], replayed["computed_elsewhere"]) == (0, True, [])
    assert [step["replayed"] for step in replayed["steps"]] == found[0]
