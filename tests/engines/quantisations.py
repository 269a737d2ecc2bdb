"""What SGLang makes of some quantisations, with or without Orbit's plug-in: the dtype of its cache of keys and values,
and the class that multiplies by a linear layer in compressed-tensors' FP8.

    PYTHONPATH=… <SGLang's python> tests/engines/quantisations.py ASKED.json

SGLang's own classes and functions, in its environment, without a model. Belongs here: asking them. Does not belong
here: any expectation.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def main(asked: dict[str, Any]) -> None:
    from orbit_runtime.sglang_plugin import activate, cpu
    from orbit_runtime.workers.servers.protocol import EXPERTS_VARIABLE, OFT_VARIABLE, VARIABLE

    os.environ.update({OFT_VARIABLE: "0", EXPERTS_VARIABLE: "", "SGLANG_USE_CPU_ENGINE": "1"})
    cpu.install()
    if asked["with_plugin"]:
        os.environ.update({VARIABLE: "1", "SGLANG_PLUGINS": "orbit"})
        activate()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import torch
    from sglang.srt.layers.quantization import get_quantization_config
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype

    told = {}
    for name, config in asked["quantisations"].items():
        quantisation = get_quantization_config(config["quant_method"]).from_config(config)
        _, dtype = configure_kv_cache_dtype(
            server_args_kv_cache_dtype="auto", model=SimpleNamespace(quant_config=quantisation),
            model_dtype=torch.bfloat16, is_draft_worker=False, is_dflash=False,
            speculative_draft_attention_backend="",
        )  # fmt: skip
        told[name] = str(dtype)
    for name, config in asked["linears"].items():
        quantisation = get_quantization_config(config["quant_method"]).from_config(config)
        # What the GPU can do is not asked here; everything else of the choice is SGLang's.
        quantisation._check_scheme_supported = lambda *_, **__: True
        parts = quantisation.target_scheme_map["Linear"]
        scheme = quantisation._get_scheme_from_parts(parts["weights"], parts["input_activations"])
        told[name] = type(scheme).__name__
    Path(asked["told"]).write_text(json.dumps(told))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
