"""A run that dies between an adapter's load and its proof: none of it counts, and what resumes is the same run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orbit_runtime.storage import open_store
from tests.integration.killing import small_manifest, timeless_rows
from tests.integration.run_launcher import RunLauncher

ROOT = Path(__file__).parents[2]
DRIVER = """
import importlib, operator, os, signal, sys
module, name, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
code = operator.attrgetter(name)(importlib.import_module(module)).__code__
calls = 0

def started(of, offset):
    global calls
    calls += 1
    if calls == last:
        os.kill(os.getpid(), signal.SIGKILL)

watch = sys.monitoring
watch.use_tool_id(watch.DEBUGGER_ID, "kill")
watch.register_callback(watch.DEBUGGER_ID, watch.events.PY_START, started)
watch.set_local_events(watch.DEBUGGER_ID, code, watch.events.PY_START)
from orbit_runtime.cli.main import main
main(sys.argv[4:])
"""
"""`orbit` that a debugger's hook kills as a function is entered for the n-th time: nothing of Orbit is replaced."""


@pytest.mark.timeout(600)  # three starts, which take minutes on a busy machine
@pytest.mark.parametrize(
    ("function", "call"),
    [
        # The first proof is that of the untrained adapter, so the third is of step 2.
        pytest.param("prove", 3, marks=pytest.mark.long),
        pytest.param("check_proofs", 3, marks=pytest.mark.long),
    ],
    ids=["before the proof", "proven, and not yet said so"],
)
def test_a_kill_between_load_and_proof_changes_no_bit(
    function: str, call: int, tmp_path: Path, launcher: RunLauncher
) -> None:
    manifest, out, alone = small_manifest(steps=4), str(tmp_path / "killed"), str(tmp_path / "alone")
    written = tmp_path / "run.json"
    written.write_text(json.dumps(manifest))
    arguments = ["orbit_runtime.parity.liveness", function, str(call), "run", str(written), "--out", out]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER, *arguments], env=environment, check=False, timeout=400, capture_output=True
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:]
    store = open_store(out)
    steps = [name for name in store.list("metrics/") if "step-" in name]
    assert len(steps) == 1, "the step before was kept, and the one whose adapter was not proven was not"
    assert launcher.run(manifest, out) == 0
    assert launcher.run(manifest, alone) == 0
    assert timeless_rows(store) == timeless_rows(open_store(alone))
    report, expected = (json.loads(open_store(place).get("report.json")) for place in (out, alone))
    assert report["adapter_digest"] == expected["adapter_digest"]
    assert report["publishes"] == report["publishes_proven"]
