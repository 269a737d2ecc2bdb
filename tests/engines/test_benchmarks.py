"""The benchmarks of a real SGLang server at their smallest size; without a server they say so (`tests/integration`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fakes.benchmark_runs import assert_measured, start_smallest

from orbit_runtime.workers.servers.process import PYTHON_VARIABLE

OPTIONS = {
    "adapter_transports": ("--only", "load"),
    "client_cost": (),
    "parity_by_format": ("--engines", "SGLang"),
    "sglang_false_alarms": ("--adapters", "LoRA"),
    "sglang_publish": ("--adapters", "OFT"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_benchmark_of_sglang_measures(name: str, tmp_path: Path) -> None:
    if not os.environ.get(PYTHON_VARIABLE):
        pytest.fail(f"{PYTHON_VARIABLE} is not set: run `make test-engines`")
    assert_measured(name, start_smallest(name, tmp_path / "out", OPTIONS[name], seconds=800), tmp_path / "out")
