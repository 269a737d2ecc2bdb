"""A checkpoint's proposal to keep keys and values in FP8: SGLang follows it, servers that Orbit starts do not."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from orbit_runtime.workers.sglang_launch import PYTHON_VARIABLE

PROGRAM = Path(__file__).parent / "kv_dtypes.py"
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


def dtypes(folder: Path, *, with_plugin: bool) -> dict[str, str]:
    python = os.environ.get(PYTHON_VARIABLE)
    assert python, f"{PYTHON_VARIABLE} is not set: run `make test-engines`"
    asked = {"with_plugin": with_plugin, "quantisations": QUANTISATIONS, "told": str(folder / "told.json")}
    (folder / "asked.json").write_text(json.dumps(asked))
    environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parents[2])}
    command = [python, str(PROGRAM), str(folder / "asked.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads((folder / "told.json").read_text()))


@pytest.mark.parametrize(
    ("with_plugin", "dtype"), [(False, "torch.float8_e4m3fn"), (True, "torch.bfloat16")], ids=["plain", "Orbit's"]
)
def test_keys_and_values_have_the_models_dtype(with_plugin: bool, dtype: str, tmp_path: Path) -> None:
    assert dtypes(tmp_path, with_plugin=with_plugin) == dict.fromkeys(QUANTISATIONS, dtype)
