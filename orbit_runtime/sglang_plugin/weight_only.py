"""FP8 that compressed-tensors wrote, multiplied without rounding activations.

Belongs here: the hook that chooses SGLang's weight-only class for linear layers. Does not belong here: formats that
SGLang has a flag or a variable for (`planner.support.kernels`), experts, for which it has no such class.

SGLang 0.5.23 uses `CompressedTensorsW8A16Fp8` (Marlin) only on GPUs without FP8, or for checkpoints that describe no
activations.
"""

from __future__ import annotations

import os
from typing import Any

from orbit_runtime.sglang_plugin import WEIGHT_ONLY_VARIABLE

CONFIG = "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors.CompressedTensorsConfig"


def hooks() -> list[tuple[str, Any, str]]:
    if not os.environ.get(WEIGHT_ONLY_VARIABLE):
        return []
    return [(f"{CONFIG}._get_scheme_from_parts", _without_activations, "AROUND")]


def _without_activations(original: Any, config: Any, weights: Any, activations: Any, *rest: Any, **named: Any) -> Any:
    """Weights by row or for the whole tensor; the class has no scales by block."""
    if not (config._is_fp8_w8a8(weights, activations) and config._is_fp8_w8a16(weights, activations)):
        return original(config, weights, activations, *rest, **named)
    from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A16Fp8

    # A static scale of activations is in the file: the class takes it, and does not use it.
    return CompressedTensorsW8A16Fp8(strategy=weights.strategy, is_static_input_scheme=not activations.dynamic)
