"""What builds the images says the same everywhere: Dockerfile, bake file, script."""

from __future__ import annotations

import re
from pathlib import Path

from orbit_runtime import __version__
from orbit_runtime.observability.trackers import PACKAGES

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
        "VERSION", "REVISION", "SOURCE_DATE_EPOCH", "BASE_IMAGE", "OPERATOR_BASE_IMAGE", "HEAVY", "CUBINS",
    }  # fmt: skip
    assert passed | set(listed[1].split()) <= ARGUMENTS


def test_the_runtime_has_what_kernels_are_compiled_with_when_they_first_run() -> None:
    """Triton: a C compiler and Python's headers. SGLang and FlashInfer: nvcc of the toolkit for which torch was built,
    CUDA's headers and libraries to link, and a C++ compiler."""
    base = re.search(r"^ARG BASE_IMAGE=docker\.io/nvidia/cuda:([\d.]+)-(\w+)-", DOCKERFILE, re.MULTILINE)
    stage = re.search(r"^FROM \$\{BASE_IMAGE\} AS runtime-base\n(.*?)\n\n", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert base is not None
    assert stage is not None
    installed = set(re.findall(r"apt-get install -y --no-install-recommends ([^\\]+)", stage[1])[0].split())
    assert {"python3", "python3-dev", "gcc", "g++"} <= installed
    pins = (ROOT / "images/constraints/node.txt").read_text(encoding="utf-8")
    runtime = re.search(r"^nvidia-cuda-runtime==(\d+\.\d+)", pins, re.MULTILINE)
    assert runtime is not None
    assert base[2] == "devel"
    assert base[1].startswith(f"{runtime[1]}.")


def test_the_runtime_holds_every_tracker_that_a_manifest_may_ask_for() -> None:
    """A pod cannot install one: what the heavy layer installs is all of the list that it copies, but for what it says
    that it leaves out."""
    stage = re.search(r"AS heavy-built\n(.*?)\nFROM ", DOCKERFILE, re.DOTALL)
    assert stage is not None
    listed = re.search(r"^COPY (\S+) /images/constraints\.txt$", stage[1], re.MULTILINE)
    left_out = re.search(r"grep -v '\^([a-z-]+)' /images/constraints\.txt > /images/heavy\.txt", stage[1])
    assert listed is not None
    assert left_out is not None
    assert "install --no-compile --no-deps -r /images/heavy.txt" in stage[1]
    lines = (ROOT / listed[1]).read_text(encoding="utf-8").splitlines()
    installed = {line.partition("==")[0] for line in lines if not line.startswith(left_out[1])}
    # MLflow's client without its server.
    wanted = {{"mlflow": "mlflow-skinny"}.get(package, package) for package in PACKAGES.values()}
    assert wanted == {"tensorboard", "wandb", "mlflow-skinny"}
    assert wanted <= installed
