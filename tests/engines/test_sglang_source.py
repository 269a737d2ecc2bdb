"""What the table of served adapters says of SGLang, read from the source of the version that is installed."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest

from orbit_runtime.planner.support import PINNED
from orbit_runtime.rollout.sglang_experts import MOE_RUNNERS
from orbit_runtime.rollout.sglang_server import PYTHON_VARIABLE

QUANTIZATION = "srt/layers/quantization"
SCHEMES = f"{QUANTIZATION}/compressed_tensors/schemes/compressed_tensors"
CLASSES = {
    "BF16": (f"{QUANTIZATION}/unquant.py", "UnquantizedFusedMoEMethod"),
    "FP8Block": (f"{QUANTIZATION}/fp8.py", "Fp8MoEMethod"),
    "INT4": (f"{SCHEMES}_wNa16_moe.py", "CompressedTensorsWNA16MoE"),
    "INT4Asymmetric": (f"{SCHEMES}_wNa16_moe.py", "CompressedTensorsWNA16MoE"),
    "NVFP4ModelOpt": (f"{QUANTIZATION}/modelopt_quant.py", "ModelOptNvFp4FusedMoEMethod"),
    "FP8": (f"{SCHEMES}_w8a8_fp8_moe.py", "CompressedTensorsW8A8Fp8MoE"),
    "NVFP4": (f"{SCHEMES}_w4a4_nvfp4_moe.py", "CompressedTensorsW4A4Nvfp4MoE"),
    "GPTQ": (f"{QUANTIZATION}/gptq/gptq.py", "GPTQMarlinMoEMethod"),
    "AWQ": (f"{QUANTIZATION}/awq/awq.py", "AWQMoEMethod"),
    "MXFP4GptOss": (f"{QUANTIZATION}/mxfp4.py", "Mxfp4MoEMethod"),
    "MXFP4V4": (f"{QUANTIZATION}/mxfp4_flashinfer_trtllm_moe.py", "Mxfp4FlashinferTrtllmMoEMethod"),
}
"""Layout of experts → the class that multiplies by them on a GPU."""


@pytest.fixture(scope="module")
def package() -> Path:
    if not os.environ.get(PYTHON_VARIABLE):
        pytest.fail(f"{PYTHON_VARIABLE} is not set: run `make test-engines`")
    ask = (
        "import importlib.util as u, importlib.metadata as m; print(u.find_spec('sglang').origin, m.version('sglang'))"
    )
    answer = subprocess.run([os.environ[PYTHON_VARIABLE], "-c", ask], capture_output=True, text=True, check=True)
    origin, version = answer.stdout.split()
    assert version == PINNED["sglang"]
    return Path(origin).parent


@pytest.mark.parametrize("layout", CLASSES)
def test_lora_on_experts_is_served_where_their_class_tells_how_they_are_packed(package: Path, layout: str) -> None:
    file, name = CLASSES[layout]
    tree = ast.parse((package / file).read_text())
    (found,) = [each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and each.name == name]
    methods = {each.name for each in found.body if isinstance(each, ast.FunctionDef)}
    runners = {"triton": "get_triton_quant_info", "marlin": "get_marlin_quant_info"}
    if layout in MOE_RUNNERS:
        assert runners[MOE_RUNNERS[layout]] in methods
    else:
        assert not methods & set(runners.values())


def test_the_kernels_that_read_requests_segments_know_experts(package: Path) -> None:
    """Another back end than the one that is asked for could leave adapters of experts out."""
    assert "_add_moe_lora_info" in (package / "srt/lora/backend/triton_backend.py").read_text()
