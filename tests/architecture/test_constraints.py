"""The pinned sets against pyproject.toml, with no network: `make constraints` is due when one of these fails."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SETS = {
    "laptop": ("", "data", "train", "dev", "operator", "trackers", "docs"),
    "bridges": ("", "train", "gym", "verifiers"),
    "node": ("", "train", "sglang", "megatron", "ray", "operator", "trackers"),
}
ENVIRONMENT = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux", "extra": ""}


def pins(name: str) -> dict[str, str]:
    """Distribution to pinned version, of the lines that hold on Linux with Python 3.12."""
    found = {}
    for line in (ROOT / "images" / "constraints" / name).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", line
            if requirement.marker is None or requirement.marker.evaluate(ENVIRONMENT):
                found[canonicalize_name(requirement.name)] = specifier.version
    return found


def unsatisfied(requirements: list[str], pinned: dict[str, str]) -> list[str]:
    wrong = []
    for line in requirements:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name != canonicalize_name(PROJECT["name"]) and (
            name not in pinned or pinned[name] not in requirement.specifier
        ):
            wrong.append(f"{line} (pinned: {pinned.get(name)})")
    return wrong


@pytest.mark.parametrize("name", SETS)
def test_every_requirement_has_a_pin_that_satisfies_it(name: str) -> None:
    groups = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    requirements = [line for extra in SETS[name] for line in groups[extra]]
    assert not unsatisfied(requirements, pins(f"{name}.txt"))


def test_every_extra_is_in_a_set() -> None:
    assert set(PROJECT["optional-dependencies"]) <= {extra for extras in SETS.values() for extra in extras}


def test_the_build_backend_is_pinned() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    assert not unsatisfied(build, pins("laptop.txt"))


@pytest.mark.parametrize("name", SETS)
def test_every_set_holds_the_shared_versions(name: str) -> None:
    pinned = pins(f"{name}.txt")
    for distribution, version in pins("shared.in").items():
        assert pinned.get(distribution, version) == version, distribution


@pytest.mark.parametrize("name", SETS)
def test_a_set_names_no_host_and_no_path(name: str) -> None:
    for line in (ROOT / "images" / "constraints" / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        assert re.fullmatch(r"[a-z0-9._-]+==[A-Za-z0-9.+!]+( ; [^@:]+)?", line), line


def test_a_missing_and_a_contradicting_pin_are_both_found() -> None:
    assert unsatisfied(["a>=2", "b", "c<3"], {"a": "1.0", "c": "2.9"}) == ["a>=2 (pinned: 1.0)", "b (pinned: None)"]
