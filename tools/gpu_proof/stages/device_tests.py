"""`tests/gpu` and the tests of kernels on the device. Does not belong here: what they test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import ROOT, NotMeasured
from tools.gpu_proof.record import NO_CARD, Record, WrongResult

PATHS = ("tests/gpu", "tests/models/kernels")
TINY_PATHS = ("tests/gpu", "tests/models/kernels/test_choice.py")
PRETENDED_PATHS = ("tests/gpu/test_cuda.py",)
"""The others are of kernels, at sizes that only a card computes."""
PROCESSES = 4
"""That share the device: most of the time of a kernel's test is its compilation, on one core each."""


def run(record: Record) -> None:
    paths: Sequence[str] = PATHS
    if record.is_tiny:
        paths = TINY_PATHS if record.device == NO_CARD else PRETENDED_PATHS
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tests.xml"
        status = subprocess.run(command(paths, file), cwd=ROOT).returncode
        if not file.is_file():
            raise WrongResult(f"pytest ended with {status} and without a result")
        counts, failures = read(file)
    record.add("tests", counts)
    if failures:
        record.add("failures", failures)
        raise WrongResult(f"{len(failures)} tests failed: {', '.join(list(failures)[:5])}")
    if status not in (0, 5):
        raise WrongResult(f"pytest ended with {status}")
    if counts["passed"] == 0:
        raise NotMeasured("every test was skipped")


def command(paths: Sequence[str], file: Path) -> list[str]:
    processes = max(1, min(PROCESSES, (os.cpu_count() or 1) // 2))
    spread = ["-n", str(processes), "--dist", "worksteal"] if processes > 1 else []
    # A hung kernel ends its test, and the tests after it are still told of.
    return [
        sys.executable, "-m", "pytest", "-q", *paths, *spread, "--timeout=240", f"--junitxml={file}",
        "-p", "no:cacheprovider",
    ]  # fmt: skip


def read(file: Path) -> tuple[dict[str, int], dict[str, str]]:
    """How many passed, failed and were skipped; and the message of each that failed."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = {}
    for case in xml.parse(file).iter("testcase"):
        wrong = next((each for each in case if each.tag in ("failure", "error")), None)
        if wrong is not None:
            counts["failed"] += 1
            name = f"{case.get('classname')}::{case.get('name')}"
            failures[name] = re.sub(r"\s+", " ", wrong.get("message") or wrong.text or "")[:500]
        else:
            counts["skipped" if any(each.tag == "skipped" for each in case) else "passed"] += 1
    return counts, failures
