"""The proof for a GPU, run where there is none: every stage at its smallest size, kernels in Triton's interpreter.

Belongs here: that it runs, resumes and tells. Does not belong here: what the stages measure on a device.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.harness import RESULTS, ROOT
from tools.gpu_proof.proof import page, run_stages
from tools.gpu_proof.record import Record
from tools.gpu_proof.stages import LAYOUTS, STAGES
from tools.gpu_proof.wheels import (
    FROM_THE_MACHINE,
    TRACKED_LIMIT,
    closure,
    pack,
    packages,
    requirements,
    tracked_bytes,
)

FACTS = {"card": "cpu", "commit": "c" * 40, "dirty": False, "tiny": True}
NEED_TRITON = ("kernel-equality", "kernel-speed-int4", "rotation-speed")
ONCE = [name for name in STAGES if name not in {f"kernel-speed-{layout.lower()}" for layout in LAYOUTS[1:]}]
"""Without the layouts beyond the first, which run the same code."""
SAMPLE = ("sglang", "device-tests", "kernel-equality", "rl-step-oft")


def proof(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.gpu_proof", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=570)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "stage", [each if each in SAMPLE else pytest.param(each, marks=pytest.mark.long) for each in ONCE]
)
def test_a_stage_runs_without_a_device(stage: str, tmp_path: Path) -> None:
    if stage in NEED_TRITON and find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    done = proof("--tiny", "--stage", stage, "--out", str(tmp_path))
    record = json.loads((tmp_path / "cpu" / f"{stage}.json").read_text())
    assert done.returncode == 0, f"{record}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert record["tiny"] is True
    assert record["status"] == "passed" or (record["status"] == "not measured" and record["why"])
    assert {"torch", "commit", "dirty", "pins", "versions", "seconds"} <= record.keys()
    assert record["found"] or record["status"] == "not measured"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "stage", [each if each in ("formats", "ranks") else pytest.param(each, marks=pytest.mark.long) for each in ONCE]
)
def test_a_stage_runs_on_a_pretended_device(stage: str, tmp_path: Path) -> None:
    done = proof("--pretended", "--stage", stage, "--out", str(tmp_path))
    record = json.loads((tmp_path / "pretended-cuda-device" / f"{stage}.json").read_text())
    assert done.returncode == 0, f"{record}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    told = done.stdout.partition("\nOrbit on Pretended CUDA device")[2]
    if stage in ("sglang", "ranks", "real-model"):
        assert f"  not measured  {stage}" in told
        assert "not run: not brought" in told
    else:
        assert f"  passed        {stage}" in told


def test_the_page_answers_whether_it_works_and_says_of_each_stage_what_it_shows_or_why_not(tmp_path: Path) -> None:
    ends = {
        "quickstart": ("passed", ""), "resume": ("failed", "exit 70"), "recompute": ("passed", ""),
        "sglang": ("not measured", "not brought"),
    }  # fmt: skip
    records = {}
    for name, (status, why) in ends.items():
        records[name] = Record.begin(tmp_path / f"{name}.json", name, FACTS)
        records[name].end(status, why)  # type: ignore[arg-type]
    assert page(FACTS | {"torch": "2.14.1"}, records).splitlines() == [
        f"Orbit on cpu, torch 2.14.1, commit {'c' * 12}",
        "Smallest sizes, kernels interpreted: the stages run; nothing was compiled for a card or measured.",
        "DOES NOT WORK: resume",
        "",
        "Does it work?",
        "  passed        quickstart                 0 s  the first run of every user learns; every publish is proven",
        "  failed        resume                     0 s  exit 70",
        "",
        "Is it right, and how fast?",
        "  passed        recompute                  0 s  it runs; times and memory not measured: no card",
        "",
        "With what was brought along",
        "  not measured  sglang                     0 s  not brought",
    ]


def test_whether_it_works_is_shown_first() -> None:
    assert list(STAGES)[:4] == ["quickstart", "resume", "formats", "serve"]
    assert list(STAGES)[-3:] == ["sglang", "ranks", "real-model"]


def test_tiny_results_cannot_come_among_those_of_cards() -> None:
    done = proof("--tiny", "--out", str(RESULTS / "gpu"))
    assert done.returncode == 2
    assert "--out" in done.stderr
    assert not (RESULTS / "gpu" / "cpu").exists()


def test_without_a_device_and_without_tiny_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = proof("--out", str(tmp_path))
    assert done.returncode == 3
    assert "no CUDA device" in done.stderr
    assert not list(tmp_path.iterdir())


def record_of(folder: Path, status: str, **changes: Any) -> None:
    record = Record.begin(folder / "quickstart.json", "quickstart", FACTS | changes)
    if status != "running":
        record.end(status)  # type: ignore[arg-type]


@pytest.mark.parametrize("status", ["passed", "failed", "not measured", "out of time"])
def test_what_this_commit_has_told_already_is_not_asked_again(tmp_path: Path, status: str) -> None:
    record_of(tmp_path, status)
    before = (tmp_path / "quickstart.json").read_bytes()
    (record,) = run_stages(["quickstart"], tmp_path, FACTS, again=False, seconds=0.0).values()
    assert record.status == status
    assert (tmp_path / "quickstart.json").read_bytes() == before


@pytest.mark.parametrize(
    ("status", "facts", "again"),
    [
        ("running", FACTS, False),
        ("passed", FACTS | {"commit": "d" * 40}, False),
        ("passed", FACTS | {"dirty": True}, False),
        ("passed", FACTS | {"commit": None}, False),
        ("passed", FACTS, True),
    ],
)
def test_what_was_cut_short_or_is_of_other_code_is_measured_again(
    tmp_path: Path, status: str, facts: dict[str, Any], again: bool
) -> None:
    record_of(tmp_path, status)
    (record,) = run_stages(["quickstart"], tmp_path, facts, again=again, seconds=0.0).values()
    assert record.status == "out of time"


def test_a_stage_that_is_stopped_keeps_what_it_had_found(tmp_path: Path) -> None:
    path = tmp_path / "stage.json"
    record = Record.begin(path, "stage", FACTS)
    record.add("first number", 1.5)
    read = Record.read(path)
    assert read is not None
    read.end("out of time", "stopped", "last lines")
    content = json.loads(path.read_text())
    assert content["found"] == {"first number": 1.5}
    assert content["output"] == "last lines"


def test_a_stage_whose_process_dies_is_a_failure_with_its_last_words(tmp_path: Path) -> None:
    (record,) = run_stages(["no such stage"], tmp_path, FACTS, again=True, seconds=60.0).values()
    assert record.status == "failed"
    assert "KeyError" in record.content["output"]


def test_the_wheels_are_everything_that_is_needed_but_what_the_machine_has() -> None:
    found = packages("3.12", "x86_64")
    assert not found.keys() & (FROM_THE_MACHINE | {"nvidia-cublas", "sympy", "pandas"})
    needed, peers = requirements()
    torch_brings = closure([Requirement("torch")], {"platform_machine": "x86_64", "sys_platform": "linux"}, set())
    named = {canonicalize_name(each.name) for each in (*needed, *peers)}
    assert named <= found.keys() | torch_brings.keys()
    for name in found:
        for requirement in map(Requirement, distribution(name).requires or ()):
            if requirement.marker is None:
                known = found.keys() | torch_brings.keys() | FROM_THE_MACHINE | {"pandas"}
                assert canonicalize_name(requirement.name) in known, f"{name} needs {requirement.name}"


def test_wheels_are_packed_into_one_archive_that_holds_them_whole(tmp_path: Path) -> None:
    folder = tmp_path / "gpu"
    folder.mkdir()
    code = b"".join(hashlib.sha256(bytes([n])).hexdigest().encode() for n in range(200))
    for name in ("one", "two", "three"):
        with ZipFile(folder / f"{name}-1-py3-none-any.whl", "w", ZIP_DEFLATED) as wheel:
            wheel.writestr(f"{name}/alike.py", code)
    (folder / "requirements.txt").write_text("one\n")
    archive = pack(folder)
    assert archive == tmp_path / "gpu.tar.xz"
    assert archive.stat().st_size < 0.5 * sum(path.stat().st_size for path in folder.iterdir())
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "there", filter="data")
    assert {path.name for path in (tmp_path / "there").iterdir()} == {path.name for path in folder.iterdir()}
    with ZipFile(tmp_path / "there" / "two-1-py3-none-any.whl") as wheel:
        assert wheel.read("two/alike.py") == code


def test_what_git_tracks_leaves_room_for_the_wheels_on_a_borrowed_machine() -> None:
    """Which takes 64 MiB: 60 with some room, 38 of it for wheels. `make gpu-wheels` refuses more."""
    assert tracked_bytes() <= TRACKED_LIMIT


@pytest.mark.parametrize("path", sorted(RESULTS.glob("gpu/*/*.json")), ids=str)
def test_a_committed_result_of_a_card_was_measured_on_a_clean_commit(path: Path) -> None:
    record = json.loads(path.read_text())
    assert record["tiny"] is False
    assert record["dirty"] is False
    assert len(record["commit"]) == 40
    assert record["status"] != "running"
