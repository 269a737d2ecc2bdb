"""A run that dies between an adapter's load and its proof: nothing of it counts, and what resumes is the same run."""

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
from tests.integration.run_nursery import Nursery

ROOT = Path(__file__).parents[2]
DRIVER = """
import os, signal, sys, threading
from pathlib import Path
calls = 0

def watch(frame, event, arg):
    global calls
    code = frame.f_code
    if event == "call" and code.co_name == sys.argv[1] and code.co_filename.endswith("orbit_runtime/" + sys.argv[2]):
        calls += 1
        if calls == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)

threading.setprofile(watch)
sys.setprofile(watch)
from orbit_runtime.cli.main import main
sys.argv = ["orbit", *sys.argv[4:]]
sys.exit(main())
"""
"""`orbit` with a profiler that kills it at the n-th call of a function: nothing of Orbit is replaced."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("function", "file", "call", "proven"),
    [
        # The first proof is that of the untrained adapter, so the third is of step 2.
        ("prove", "parity/liveness.py", 3, 1),
        ("unload_adapter", "rollout/torch_engine.py", 4, 1),
    ],
    ids=["before the proof", "before the predecessor is retired"],
)
def test_a_kill_between_load_and_proof_changes_no_bit(
    function: str, file: str, call: int, proven: int, tmp_path: Path, nursery: Nursery
) -> None:
    manifest, out, alone = small_manifest(steps=4), str(tmp_path / "killed"), str(tmp_path / "alone")
    written = tmp_path / "run.json"
    written.write_text(json.dumps(manifest))
    arguments = [function, file, str(call), "run", str(written), "--out", out]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER, *arguments], env=environment, check=False, timeout=200, capture_output=True
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:]
    store = open_store(out)
    steps = [name for name in store.list("metrics/") if "step-" in name]
    assert len(steps) >= proven, "steps before it were kept"
    assert len(steps) < 4, "the one whose adapter was not proven was not"
    assert nursery.run(manifest, out) == 0
    assert nursery.run(manifest, alone) == 0
    assert timeless_rows(store) == timeless_rows(open_store(alone))
    report, expected = (json.loads(open_store(place).get("report.json")) for place in (out, alone))
    assert report["adapter_digest"] == expected["adapter_digest"]
    assert report["publishes"] == report["publishes_proven"]
