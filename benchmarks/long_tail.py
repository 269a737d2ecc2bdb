"""A small model whose answers have long-tailed lengths: the same geometric distribution for every engine.

Belongs here: the model and the manifest's reward for it. Does not belong here: measuring.

With random weights near zero each of 512 tokens is about equally likely, and 13 of them end an answer. So lengths are
geometric with mean 38 when cut at 128, and stay so as long as the model does not learn: both sides train with a rate of
1e-6.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from orbit_runtime.model_info.builtin_models import builtin_folder

VOCABULARY = 512
ENDS = 13
MAX_NEW_TOKENS = 128
LEARNING_RATE = 1e-6


def even_length(completion: str, prompt: Any, fields: Any) -> float:
    """A reward that differs within each group, so that neither side can skip a sample."""
    return float(len(completion) % 2 == 0)


def build_model_folder(folder: Path) -> Path:
    """Writes a Qwen3 of tiny-adder's sizes with 512 tokens; returns `folder`."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    source = builtin_folder("tiny-adder", "BF16")
    folder.mkdir(parents=True)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words.update({chr(0x4E00 + index): index for index in range(len(words), VOCABULARY)})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    config = json.loads((source / "config.json").read_text())
    ends = [config["eos_token_id"], *range(VOCABULARY - ENDS + 1, VOCABULARY)]
    config |= {"vocab_size": VOCABULARY, "eos_token_id": ends}
    (folder / "config.json").write_text(json.dumps(config))
    generation = {"do_sample": True, "eos_token_id": ends, "pad_token_id": config["pad_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(generation))

    shapes = {name: tensor.shape for name, tensor in Qwen3ForCausalLM(Qwen3Config(**config)).named_parameters()}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
        for name, shape in shapes.items()
    }
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
