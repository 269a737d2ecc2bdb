"""What the operator may know: a little of the runtime, never torch, and no API where it decides."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPERATOR = ROOT / "operator" / "orbit_operator"

ALLOWED = ("orbit_runtime.spec", "orbit_runtime.planner", "orbit_runtime.model_info", "orbit_runtime.errors")
PURE = ("facts", "actions", "plan", "ending", "attempts", "describe", "status", "stored", "policies", "manifests")
"""They decide: no clock, no network, no framework."""
IMPURE = {"kopf", "kubernetes", "aiohttp", "asyncio", "time", "random", "socket", "os", "prometheus_client", "logging"}


def modules() -> list[tuple[str, ast.Module]]:
    """Path within the operator, without suffix, and syntax tree."""
    return [
        (path.relative_to(OPERATOR).with_suffix("").as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(OPERATOR.rglob("*.py"))
    ]


def imports(tree: ast.Module) -> set[str]:
    """Dotted names of everything that `tree` imports, at any depth."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def is_within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize(("module", "tree"), modules())
def test_the_operator_knows_only_four_packages_of_the_runtime(module: str, tree: ast.Module) -> None:
    wrong = {name for name in imports(tree) if name.startswith("orbit_runtime") and not is_within(name, ALLOWED)}
    assert not wrong, f"{module}: {wrong}"


@pytest.mark.parametrize(("module", "tree"), modules())
def test_the_operator_imports_nothing_heavy(module: str, tree: ast.Module) -> None:
    heavy = ("torch", "transformers", "numpy", "safetensors", "pandas")
    assert not {name for name in imports(tree) if is_within(name, heavy)}, module


@pytest.mark.parametrize(("module", "tree"), [(name, tree) for name, tree in modules() if name.split("/")[0] in PURE])
def test_what_decides_has_no_clock_and_no_network(module: str, tree: ast.Module) -> None:
    assert not {name.split(".")[0] for name in imports(tree)} & IMPURE, module


def test_every_module_says_what_it_is() -> None:
    silent = [name for name, tree in modules() if not ast.get_docstring(tree)]
    assert not silent


IN_ITS_IMAGE = """
import importlib, pkgutil, sys
from importlib.metadata import packages_distributions

installed, known = set(sys.argv[1].split()), packages_distributions()

class Refuse:
    def find_spec(self, name, path=None, target=None):
        owners = {each.lower().replace("_", "-") for each in known.get(name, ())}
        if owners and not owners & installed:
            raise ModuleNotFoundError(f"{name} is not in the operator's image", name=name)

sys.meta_path.insert(0, Refuse())
import orbit_operator
for module in pkgutil.walk_packages(orbit_operator.__path__, "orbit_operator."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)

from orbit_operator.observe import check_plan
from orbit_runtime.spec import load_manifest
for path in sys.argv[2:]:
    for product in (None, "NVIDIA-B200"):
        run = load_manifest(path, environ={})
        placement = run.spec.placement.model_copy(update={"gpus": 8, "gpu_product": product})
        check_plan(run.model_copy(update={"spec": run.spec.model_copy(update={"placement": placement})}))
"""


def installed_in_the_image() -> set[str]:
    """Distributions of `images/operator.in` with all that they require."""
    lines = (ROOT / "images" / "operator.in").read_text(encoding="utf-8").splitlines()
    found: set[str] = set()
    open_ = [line for line in lines if line and not line.startswith("#")]
    while open_:
        name = re.split(r"[^\w.-]", open_.pop())[0].lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        try:
            required = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # For another system or interpreter.
        open_ += [each for each in required if "extra ==" not in each]
    return found


def test_the_operator_works_with_what_its_image_installs() -> None:
    """Whatever it imports, at any depth and late, comes with `images/operator.in`."""
    examples = [str(path) for path in sorted((ROOT / "examples").glob("*.yaml"))]
    assert examples
    installed = installed_in_the_image() | {"orbit-rl", "setuptools", "pip"}
    command = [sys.executable, "-c", IN_ITS_IMAGE, " ".join(sorted(installed)), *examples]
    environment = {"PYTHONPATH": f"{OPERATOR.parent}:{ROOT}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
