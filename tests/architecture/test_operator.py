"""What the operator may know: a little of the runtime, never torch, and no API where it decides."""

from __future__ import annotations

import ast
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
