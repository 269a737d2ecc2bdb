"""The names that stay: `public_names.txt` lists each with its signature, and this holds the code to it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

LIST = Path(__file__).with_name("public_names.txt")
MODULES = {
    "orbit_runtime": ("Compared", "Headline", "OrbitError", "OrbitRun", "Report", "Sample", "load_manifest", "run"),
    "orbit_runtime.agents": None,
    "orbit_runtime.algorithms": ("LossInputs", "ScoredGroup", "TokenLosses"),
    "orbit_runtime.environments": ("Chosen", "Step"),
    "orbit_runtime.environments.rewards": ("WrongAnswer",),
    "orbit_runtime.errors": None,
}
"""Module → its public names; None: all that it has."""


def names_of(module: str) -> list[str]:
    named = MODULES[module]
    if named is not None:
        return list(named)
    found = importlib.import_module(module)
    own = [name for name, value in vars(found).items() if isinstance(value, type) and value.__module__ == module]
    return sorted(getattr(found, "__all__", own))


def signature_of(value: Any) -> str:
    """Empty for what nobody calls by itself: manifests, errors and choices."""
    if isinstance(value, type) and (issubclass(value, Enum | BaseException) or hasattr(value, "model_fields")):
        return ""
    return str(inspect.signature(value)).replace("'", "")


def members(owner: type) -> list[str]:
    """What it has beside its fields, which its signature names; of its own and of our classes below it."""
    if issubclass(owner, Enum):
        return [f".{each.name} = {each.value}" for each in owner]
    if issubclass(owner, BaseException):
        return [f".exit_code = {owner.exit_code}"] if hasattr(owner, "exit_code") else []
    fields = {each.name for each in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
    found = []
    for name in sorted({name for kind in owner.__mro__ if kind.__module__.startswith("orbit") for name in vars(kind)}):
        value = inspect.getattr_static(owner, name)
        if name.startswith(("_", "model_")) or name in fields or name == "rules":
            continue
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if not inspect.isfunction(function):
            found.append(f".{name}")
            continue
        is_async = inspect.iscoroutinefunction(function)
        found.append(f".{name}{signature_of(function)}{' awaited' if is_async else ''}")
    return found


def described() -> list[str]:
    lines = []
    for module in MODULES:
        for name in names_of(module):
            value = getattr(importlib.import_module(module), name)
            lines.append(f"{module}.{name}{signature_of(value)}")
            if isinstance(value, type):
                lines += [f"{module}.{name}{member}" for member in members(value)]
    return lines


def test_every_public_name_is_as_the_list_has_it() -> None:
    now, listed = described(), LIST.read_text(encoding="utf-8").splitlines()
    gone = [line for line in listed if line not in now]
    new = [line for line in now if line not in listed]
    assert (gone, new) == ([], []), (
        "names that people import: docs/python/README.md says what they may rely on. Change the list with the code, "
        f"and say it in CHANGELOG.md; the whole of it now:\n{chr(10).join(now)}"
    )


def test_the_package_lists_its_names_and_no_others() -> None:
    import orbit_runtime

    assert set(orbit_runtime.__all__) == set(MODULES["orbit_runtime"] or ())
    assert set(dir(orbit_runtime)) >= set(orbit_runtime.__all__)
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        _ = orbit_runtime.train


def test_importing_the_package_loads_nothing_and_its_names_no_torch() -> None:
    source = (
        "import sys, orbit_runtime\n"
        "print(sorted(name for name in sys.modules if name.startswith('orbit')))\n"
        "from orbit_runtime import run, load_manifest, Report, OrbitError\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'pandas'} & set(sys.modules)))\n"
    )
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["['orbit_runtime', 'orbit_runtime.lazy', 'orbit_runtime.version']", "[]"]
