"""The heavy packages of these tests' own environment, which each node gives to every container, read-only.

Torch and its libraries are gigabytes: an image with them inside would take longer to import than all tests take. On a
GPU node the container toolkit puts the driver's libraries into containers in the same way: no pod asks for them.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import tempfile
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from cluster.bed.processes import run
from cluster.bed.programs import find_program

MOUNT_PATH = "/opt/heavy"
"""Where an image that was built with HEAVY=mounted looks; to others it means nothing."""
ROOT = Path(__file__).parents[3]
PACKAGES = Path(sysconfig.get_path("purelib"))
SIGNS = ("torch", "sympy", "transformers", "numpy", "triton", "accelerate", "pydantic")
"""Most of what a run imports."""


def build_container_spec() -> dict[str, Any]:
    """containerd's own default, one mount more, and one thread of mathematics for each process.

    With a thread for each core, the pods of these tests and all else on the machine would mostly wait for each other.
    """
    compile_heavy()
    spec = dict(json.loads(run(find_program("ctr"), "oci", "spec")))
    options = ["rbind", "ro", "nosuid", "nodev"]
    spec["mounts"].append({"destination": MOUNT_PATH, "type": "bind", "source": str(PACKAGES), "options": options})
    spec["process"].setdefault("env", []).append("OMP_NUM_THREADS=1")
    return spec


def compile_heavy() -> None:
    """Byte code of everything that a run imports, unless it is there.

    A fresh environment has none, and pods cannot write theirs: each would spend most of its time on it. A run's first
    step, outside, imports the same.
    """
    if all(Path(cache_from_source(str(PACKAGES / name / "__init__.py"))).exists() for name in SIGNS):
        return
    writing = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    program = [sys.executable, "-m", "orbit_runtime.cli.main", "run", str(ROOT / "examples/quickstart.yaml")]
    with tempfile.TemporaryDirectory() as folder:
        run(
            *program,
            "--set",
            "spec.training.steps=1",
            "--out",
            folder,
            environment={**writing, "PYTHONPATH": str(ROOT)},
        )
