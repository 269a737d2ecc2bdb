"""The operator's benchmark at its smallest size, where kwok is among the programs; without it, it says so."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from cluster.bed.programs import FOLDERS, find_program
from fakes.benchmark_runs import assert_measured, assert_not_measured, start_smallest


@pytest.mark.timeout(900)
def test_the_operators_benchmark_measures(tmp_path: Path) -> None:
    find_program("kube-apiserver")
    done = start_smallest("operator_scale", tmp_path / "out", seconds=800)
    if shutil.which("kwok", path=os.environ[FOLDERS]):
        assert_measured("operator_scale", done, tmp_path / "out")
    else:
        assert_not_measured("operator_scale", done, tmp_path / "out", "no kwok in ORBIT_TEST_PROGRAMS")
