"""Every program of benchmarks/ at its smallest size: it measures, or it says why not, aloud and with nothing written.

Those that need SGLang or a cluster are measured in `tests/engines` and `tests/cluster`; here they have to say so.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from fakes.benchmark_runs import assert_measured, assert_not_measured, start_smallest

from benchmarks.programs import programs

HERE: dict[str, tuple[str, ...]] = {
    "adapter_transports": ("--only", "medium"),
    "eval_api": (),
    "deduplicate": (),
    "episodes": (),
    "family_speed": (),
    "frozen_linear": (),
    "generation_vs_transformers": (),
    "quantised_base": (),
    "loading_memory": (),
    "long_attention": (),
    "objective_vs_trl": (),
    "objectives": (),
    "parity_by_format": ("--engines", "Torch"),
    "pipelined": (),
    "plan_seconds": (),
    "planned_memory": (),
    "ranks_publish": (),
    "ranks_step": (),
    "rl_step_vs_trl": (),
    "serving": (),
    "sft_speed": (),
    "vocabulary_loss": (),
}
"""What can be measured with Python alone, and the options that leave out the rest."""
SGLANG = ("adapter_transports", "client_cost", "parity_by_format", "sglang_false_alarms", "sglang_publish")
VARIABLES = ("ORBIT_SGLANG_PYTHON", "ORBIT_TEST_PROGRAMS")
HAS_SGLANG = importlib.util.find_spec("sglang") is not None
HAS_VENDORS = all(importlib.util.find_spec(name) for name in ("torchao", "bitsandbytes"))

# Most of it is the import of torch and transformers in each; on a busy machine that alone takes a minute.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_benchmark_is_in_one_of_these_tests() -> None:
    others = {*SGLANG, "frozen_linear_vs_libraries", "operator_scale"}
    assert {path.stem for path in programs()} == HERE.keys() | others


@pytest.mark.long
@pytest.mark.parametrize("name", HERE)
def test_what_needs_only_python_measures(name: str, tmp_path: Path) -> None:
    done = start_smallest(name, tmp_path / "out", HERE[name], without=VARIABLES)
    assert_measured(name, done, tmp_path / "out")


@pytest.mark.skipif(HAS_SGLANG, reason="SGLang is installed beside us: tests/engines measures with it")
@pytest.mark.parametrize("name", SGLANG)
def test_without_sglang_its_benchmarks_say_so(name: str, tmp_path: Path) -> None:
    done = start_smallest(name, tmp_path / "out", without=VARIABLES)
    assert_not_measured(name, done, tmp_path / "out", "ORBIT_SGLANG_PYTHON is not set")


def test_without_kubernetes_programs_the_operators_benchmark_says_so(tmp_path: Path) -> None:
    done = start_smallest("operator_scale", tmp_path / "out", without=VARIABLES)
    assert_not_measured("operator_scale", done, tmp_path / "out", "ORBIT_TEST_PROGRAMS is not set")


@pytest.mark.long
def test_other_libraries_are_measured_where_they_are_installed(tmp_path: Path) -> None:
    name = "frozen_linear_vs_libraries"
    done = start_smallest(name, tmp_path / "out")
    if HAS_VENDORS:
        assert_measured(name, done, tmp_path / "out")
    else:
        assert_not_measured(name, done, tmp_path / "out", "make vendor-table")
