"""What a checkpoint proposes and SGLang would follow, but servers that Orbit starts do not: keys and values in FP8, and
activations in FP8."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.workers.servers.process import PYTHON_VARIABLE
from orbit_runtime.workers.servers.protocol import WEIGHT_ONLY_VARIABLE

PROGRAM = Path(__file__).parent / "quantisations.py"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
LEGACY = {"kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
QUANTISATIONS = {
    "ModelOpt NVFP4, older": {
        "quant_method": "modelopt_fp4", "quantization": {"quant_algo": "NVFP4", "group_size": 16, **LEGACY},
    },
    "ModelOpt NVFP4": {
        "quant_method": "modelopt_fp4", "quant_algo": "NVFP4", "kv_cache_scheme": FP8, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"weights": {"group_size": 16}}},
    },
    "ModelOpt FP8": {"quant_method": "modelopt_fp8", "quantization": {"quant_algo": "FP8", **LEGACY}},
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}}, "kv_cache_scheme": FP8,
    },
    "FP8": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "kv_cache_quant_algo": "FP8",
    },
}  # fmt: skip


def fp8(weights_by: str, /, **more: Any) -> dict[str, Any]:
    """FP8 as llm-compressor writes it; activations by token, as they come, unless `more` says otherwise."""
    rounded = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True, **more}
    block = {"block_structure": [128, 128]} if weights_by == "block" else {}
    weights = {**FP8, "strategy": weights_by, **block}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rounded}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


LINEARS = {
    "by row": fp8("channel"),
    "by tensor, activations static": fp8("tensor", strategy="tensor", dynamic=False),
    "by block": fp8("block", strategy="group", group_size=128),
}


def told(folder: Path, *, with_plugin: bool) -> dict[str, str]:
    python = os.environ.get(PYTHON_VARIABLE)
    assert python, f"{PYTHON_VARIABLE} is not set: run `make test-engines`"
    asked = {
        "with_plugin": with_plugin,
        "quantisations": QUANTISATIONS,
        "linears": LINEARS,
        "told": str(folder / "told.json"),
    }
    (folder / "asked.json").write_text(json.dumps(asked))
    own = {"PYTHONPATH": str(PROGRAM.parents[2]), WEIGHT_ONLY_VARIABLE: "1"}
    command = [python, str(PROGRAM), str(folder / "asked.json")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **own}, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads((folder / "told.json").read_text()))


W8A8, W8A16 = "CompressedTensorsW8A8Fp8", "CompressedTensorsW8A16Fp8"


@pytest.mark.parametrize("with_plugin", [False, True], ids=["plain", "Orbit's"])
def test_a_server_follows_the_manifest_instead_of_the_checkpoint(with_plugin: bool, tmp_path: Path) -> None:
    found = told(tmp_path, with_plugin=with_plugin)
    dtype = "torch.bfloat16" if with_plugin else "torch.float8_e4m3fn"
    assert {name: found[name] for name in QUANTISATIONS} == dict.fromkeys(QUANTISATIONS, dtype)
    weight_only = W8A16 if with_plugin else W8A8
    assert [found[name] for name in LINEARS] == [weight_only, weight_only, W8A8]
