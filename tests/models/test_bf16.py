"""Runs that compute in BF16, as every GPU does: no gate stops a healthy one, and what it chose holds on resume."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.loop import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import OrbitRun
from tests.integration.killing import small_manifest

CASES = (
    ("tiny-adder", "INT4", "LoRA"),
    ("tiny-adder", "NVFP4", "OFT"),
    ("tiny-qwen3", "BF16", "LoRA"),
    ("tiny-qwen3-moe", "FP8", "LoRA"),
    ("tiny-qwen3-moe", "NVFP4", "LoRA"),
)


def manifest(model: str, precision: str, adapter: str) -> dict[str, Any]:
    asked = copy.deepcopy(small_manifest(steps=2, adapter=adapter))
    asked["spec"]["model"] |= {"uri": f"builtin://{model}", "precision": precision, "computePrecision": "BF16"}
    return asked


@pytest.mark.parametrize(("model", "precision", "adapter"), CASES)
def test_a_healthy_run_in_bf16_passes_its_gates(model: str, precision: str, adapter: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(OrbitRun.model_validate(manifest(model, precision, adapter)), out=str(folder), progress=SilentProgress())
    (measured,) = [json.loads(path.read_text()) for path in folder.glob("parity/preflight-*.json")]
    assert measured["limit"] == (0.03 if precision == "BF16" else 0.05)
    # Both sides' rounding, not a fault; FP32's limit of 1e-4 would have stopped the run.
    assert measured["base"]["mean"] > 1e-4


def test_a_resumed_run_computes_as_its_first_start_did(tmp_path: Path) -> None:
    asked = manifest("tiny-adder", "INT4", "LoRA")
    run(OrbitRun.model_validate(asked), out=str(tmp_path / "run"), progress=SilentProgress())
    del asked["spec"]["model"]["computePrecision"]
    asked["spec"]["training"]["steps"] = 3
    run(OrbitRun.model_validate(asked), out=str(tmp_path / "run"), progress=SilentProgress())
    kept = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (kept["compute_dtype"], kept["resolved"]["spec"]["model"]["computePrecision"]) == ("bfloat16", "BF16")
