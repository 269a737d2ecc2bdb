"""The command line starts light: neither torch nor anything that comes with it is loaded before the manifest is valid.

How long it takes is measured in `benchmarks/`, not here.
"""

from __future__ import annotations

import subprocess
import sys
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
    "module", ["errors", "digests", "types", "seeds", "spec", "workers", "storage", "model_info", "planner"]
)
def test_a_package_of_the_light_install_loads_nothing_heavy(module: str) -> None:
    if not [*ROOT.glob(f"orbit_runtime/{module}.py"), *ROOT.glob(f"orbit_runtime/{module}/__init__.py")]:
        pytest.skip(f"orbit_runtime.{module} does not exist yet")
    source = f"import sys, orbit_runtime.{module}; print(*(name.split('.')[0] for name in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert not set(ended.stdout.split()) & HEAVY
