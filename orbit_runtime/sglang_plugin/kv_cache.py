"""Keys and values stay in the model's dtype, whatever a checkpoint proposes.

Belongs here: the hooks of quantisations that would choose another dtype for SGLang's cache. Does not belong here: the
cache's size (`planner`), weights.

Most of NVIDIA's exports, and some in compressed-tensors, come with scales for a cache in FP8. SGLang 0.5.23 then stores
keys and values in FP8 by itself (`mem_cache/kv_cache_dtype.py`, "auto"), while the trainer computes them in BF16 and
the plan counts two bytes each. `--kv-cache-dtype bf16` would not undo it: attention back ends apply a checkpoint's
scales to every cache that is not "auto". So the quantisation is told that there is no proposal. DeepSeek-V4's cache,
whose dtype its attention prescribes, is not affected.
"""

from __future__ import annotations

from typing import Any

QUANTISATION = "sglang.srt.layers.quantization"
PROPOSALS = {
    f"{QUANTISATION}.modelopt_quant.ModelOptQuantConfig": "kv_cache_quant_algo",
    f"{QUANTISATION}.fp8.Fp8Config": "kv_cache_quant_algo",
    f"{QUANTISATION}.compressed_tensors.compressed_tensors.CompressedTensorsConfig": "kv_cache_scheme",
}
"""Class → the attribute that proposes a dtype for keys and values."""


def hooks() -> list[tuple[str, Any, str]]:
    return [(f"{name}.__init__", _forget, "AFTER") for name in PROPOSALS]


def _forget(_result: None, quantisation: Any, /, *_: Any, **__: Any) -> None:
    for name in set(PROPOSALS.values()):
        if name in vars(quantisation):
            setattr(quantisation, name, None)
