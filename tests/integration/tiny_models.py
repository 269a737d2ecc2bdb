"""Random checkpoints of real architectures, small enough to be made on the spot."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from orbit_runtime.model_info.builtin_models import builtin_folder

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
ARCHITECTURES = {
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": False},
    "olmo2": {"tie_word_embeddings": False},
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_checkpoint(folder: Path, architecture: str, *, max_shard_size: str = "5GB", seed: int = 0) -> Path:
    """A BF16 checkpoint with the tokenizer of the shipped model; weights large enough that layers matter."""
    config = AutoConfig.for_model(architecture, **SIZES, **ARCHITECTURES[architecture])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.15)
            elif "norm" in name:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
            else:
                torch.nn.init.normal_(parameter, std=0.1)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=max_shard_size)
    for path in builtin_folder("tiny-adder", "BF16").iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(path, folder / path.name)
    return folder


def load_reference(folder: Path) -> PreTrainedModel:
    """transformers' own model over the same values, in fp32 with its plainest attention."""
    has_tower = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    model, found = (AutoModelForImageTextToText if has_tower else AutoModelForCausalLM).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    # Otherwise it would compare with what transformers made up for weights that it did not find.
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    return model.eval()


def reference_logprobs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Log-prob of every token after the first."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return logits[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0]
