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
"""The path that an image built with HEAVY=mounted reads; it means nothing to others."""
SGLANG_PATH = "/opt/sglang"
PYTHON_VARIABLE = "ORBIT_SGLANG_PYTHON"
ROOT = Path(__file__).parents[3]
PACKAGES = Path(sysconfig.get_path("purelib"))
SIGNS = ("torch", "sympy", "transformers", "numpy", "triton", "accelerate", "pydantic")
"""Most of what a run imports."""


def build_container_spec(folder: Path) -> dict[str, Any]:
    """containerd's own default, what is mounted, and one thread of mathematics for each process.

    With a thread for each core, the pods of these tests and all else on the machine would mostly wait for each other.

    Where these tests know an environment with SGLang, so does each container: at a path of its own, for the versions
    of its packages are not those of the trainer's.

    Args:
        folder: of the node, for what is mounted and has no file of its own.
    """
    compile_heavy()
    spec = dict(json.loads(run(find_program("ctr"), "oci", "spec")))
    variables = spec["process"].setdefault("env", [])
    spec["mounts"].append(_build_mount(MOUNT_PATH, PACKAGES))
    variables.append("OMP_NUM_THREADS=1")
    if python := os.environ.get(PYTHON_VARIABLE):
        spec["mounts"] += _build_sglang_mounts(folder / "sglang", Path(python))
        variables.append(f"{PYTHON_VARIABLE}={SGLANG_PATH}/bin/python")
    return spec


def _build_mount(destination: str, source: Path) -> dict[str, Any]:
    options = ["rbind", "ro", "nosuid", "nodev"]
    return {"destination": destination, "type": "bind", "source": str(source), "options": options}


def _build_sglang_mounts(folder: Path, python: Path) -> list[dict[str, Any]]:
    """A virtual environment of the image's interpreter, and in it the packages of this machine's."""
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    inside = packages.relative_to(python.parents[1])
    for part in (inside, Path("bin")):
        (folder / part).mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("home = /usr/local/bin\ninclude-system-site-packages = false\n")
    (folder / "bin/python").symlink_to("/usr/local/bin/python3")
    return [_build_mount(SGLANG_PATH, folder), _build_mount(f"{SGLANG_PATH}/{inside}", packages)]


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
