"""The operator and the command line import the manifest at every start: it must bring nothing heavy in."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "numpy", "rich", "typer", "ruamel.yaml", "obstore")


def test_importing_the_manifest_loads_nothing_heavy() -> None:
    code = f"import sys, orbit_runtime.spec; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
