"""The command line starts light: neither torch nor anything that comes with it is loaded before the manifest is valid.

How long it takes is measured in `benchmarks/`, not here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pandas",
    "pyarrow",
    "sympy",
    "peft",
    "datasets",
}

REPORT = """
import sys
from orbit_runtime.cli.main import main
try:
    code = main()
except SystemExit as end:
    code = end.code
print("LOADED", *sorted({name.split(".")[0] for name in sys.modules}))
sys.exit(code)
"""


def loaded_by(*arguments: str) -> set[str]:
    """Top-level modules that stand in `sys.modules` after `orbit ARGUMENTS` succeeded."""
    ended = subprocess.run([sys.executable, "-c", REPORT, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("LOADED ")]
    return set(line.split()[1:])


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["run", "--help"], ["validate", "examples/quickstart.yaml"], ["inspect", "builtin://tiny-adder"]],
)
def test_the_command_line_loads_nothing_heavy(arguments: list[str]) -> None:
    for needed in ("orbit_runtime/cli/main.py", "examples/quickstart.yaml"):
        if not (ROOT / needed).exists():
            pytest.skip(f"{needed} does not exist yet")
    assert not loaded_by(*arguments) & HEAVY


@pytest.mark.parametrize(
    "module", ["errors", "digests", "types", "seeds", "spec", "ports", "workers", "storage", "model_info", "planner"]
)
def test_a_package_of_the_light_install_loads_nothing_heavy(module: str) -> None:
    if not [*ROOT.glob(f"orbit_runtime/{module}.py"), *ROOT.glob(f"orbit_runtime/{module}/__init__.py")]:
        pytest.skip(f"orbit_runtime.{module} does not exist yet")
    source = f"import sys, orbit_runtime.{module}; print(*(name.split('.')[0] for name in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert not set(ended.stdout.split()) & HEAVY


@pytest.mark.parametrize(
    "module",
    [
        "loop.run",
        "loop.measure",
        "sides.trainers",
        "sides.engines",
        "algorithms.table",
        "policy.facts",
        "rollout.attached",
        "services.orchestrate",
    ],
)
def test_what_a_run_does_beside_computing_loads_no_torch(module: str) -> None:
    source = f"import sys; sys.modules['torch'] = None; import orbit_runtime.{module}"
    ended = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


LIGHT_INSTALL = """
import sys
from importlib.machinery import PathFinder

class Light(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow",
                                  "accelerate"}:
            return None
        return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Light
from orbit_runtime.cli.main import main
main()
"""
"""The command line where nothing of the extra `train` is installed: those modules cannot be found."""


def light(folder: Path, *arguments: str) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "-c", LIGHT_INSTALL, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    return ended.returncode, ended.stdout + ended.stderr


QUICKSTART = str(ROOT / "examples" / "quickstart.yaml")
WITHOUT_TORCH = [
    ["run", QUICKSTART, "--dry-run"],
    ["validate", QUICKSTART],
    ["plan", QUICKSTART],
    ["inspect", "builtin://tiny-adder"],
    ["init"],
    ["ls", "."],
]
NEEDS_TORCH = [
    ["run", QUICKSTART],
    ["replay", "nowhere"],
    ["parity", QUICKSTART],
    ["convert", "builtin://tiny-adder", "new", "--precision", "FP8"],
    ["merge", "nowhere", "--out", "new"],
]


@pytest.mark.parametrize("arguments", WITHOUT_TORCH, ids=lambda each: each[0])
def test_the_light_install_does_what_needs_no_torch(tmp_path: Path, arguments: list[str]) -> None:
    code, said = light(tmp_path, *arguments)
    assert (code, "a bug in Orbit" in said) == (0, False), said


@pytest.mark.parametrize("arguments", NEEDS_TORCH, ids=lambda each: each[0])
def test_the_light_install_says_how_to_install_what_a_command_needs(tmp_path: Path, arguments: list[str]) -> None:
    code, said = light(tmp_path, *arguments)
    assert code == 78, said
    assert "torch" in said
    assert "pip install 'orbit-rl[train]'" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["torch", "transformers", "sympy", "orbit_runtime"])
def test_what_was_installed_is_compiled(package: str) -> None:
    """Otherwise each process compiles it anew where nothing may be written."""
    found = find_spec(package)
    assert found is not None
    assert found.origin is not None
    assert Path(cache_from_source(found.origin)).is_file(), "`make dev` compiles: call it again"
