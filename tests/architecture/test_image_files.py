"""What builds the images says the same everywhere: Dockerfile, bake file, script."""

from __future__ import annotations

import re
from pathlib import Path

from orbit_runtime import __version__

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
BAKE = (ROOT / "images/bake.hcl").read_text(encoding="utf-8")
SCRIPT = (ROOT / "tools/images.sh").read_text(encoding="utf-8")
ARGUMENTS = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
STAGES = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))


def test_the_bake_file_builds_stages_that_exist_with_arguments_that_they_take() -> None:
    assert set(re.findall(r'^  target += "(\w+)"', BAKE, re.MULTILINE)) == {"operator", "runtime"} <= STAGES
    passed = re.findall(r"^    (\w+) += (\w+)$", BAKE, re.MULTILINE)
    assert (
        {name for name, _ in passed} == {value for _, value in passed} == {"VERSION", "REVISION", "SOURCE_DATE_EPOCH"}
    )
    assert {name for name, _ in passed} <= ARGUMENTS
    declared = dict(re.findall(r'^variable "(\w+)" \{ default = "([^"]*)" \}$', BAKE, re.MULTILINE))
    assert {name for name, _ in passed} <= declared.keys()
    assert declared["VERSION"] == __version__


def test_the_script_passes_arguments_that_the_dockerfile_takes() -> None:
    passed = set(re.findall(r'--build-arg "(\w+)=', SCRIPT))
    listed = re.search(r"for name in ([A-Z_ ]+); do", SCRIPT)
    assert listed is not None
    assert passed | set(listed[1].split()) == {
        "VERSION", "REVISION", "SOURCE_DATE_EPOCH", "BASE_IMAGE", "OPERATOR_BASE_IMAGE", "HEAVY",
    }  # fmt: skip
    assert passed | set(listed[1].split()) <= ARGUMENTS
