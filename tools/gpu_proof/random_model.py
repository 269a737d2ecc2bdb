"""A checkpoint of a named model's shape with random weights: what a step costs depends on nothing else.

Belongs here: making it, as such checkpoints are published. Does not belong here: measuring with it (`stages`).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.model_info.cards import load_card
from orbit_runtime.quant.formats import FORMATS
from orbit_runtime.quant.int4 import INT4Weight

GROUP = 32
STANDARD_DEVIATION = 0.02
INT4_SCALE = STANDARD_DEVIATION / 4.61
"""All sixteen codes are equally frequent: their standard deviation is 4.61."""
LINEAR = re.compile(r".*_proj\.weight$")
FIRST_CHARACTER = 0x10000
"""Of the characters that stand for tokens which the shipped tokenizer does not have."""
TINY = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96,
}  # fmt: skip
QUANTIZATION = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True, "dynamic": False,
    }}},
}  # fmt: skip


def build_random_model(folder: Path, precision: str, *, device: str, tiny: bool = False) -> Path:
    """Writes Qwen3-4B's shape, or one of its family that is tiny; returns `folder`.

    Args:
        precision: `BF16` or `INT4`.
        device: where the random numbers are drawn; four billion of them take a CPU minutes.
    """
    from transformers import AutoConfig

    fields = dict(load_card("Qwen3-4B")["config"]) | (TINY if tiny else {})
    kind = fields.pop("model_type")
    config = AutoConfig.for_model(
        kind, **fields, pad_token_id=0, eos_token_id=1, bos_token_id=None, rope_theta=1e6, max_position_embeddings=40960
    )
    folder.mkdir(parents=True)
    written = config.to_dict() | {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"}
    if precision == "INT4":
        written["quantization_config"] = QUANTIZATION
    (folder / "config.json").write_text(json.dumps(written))
    _write_tokenizer(folder, config.vocab_size)
    _write_weights(folder, _shapes(config), precision, torch.Generator(device).manual_seed(0))
    return folder


def _shapes(config: Any) -> dict[str, torch.Size]:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if config.tie_word_embeddings:
        # Without storage two parameters are not known to be one.
        shapes.pop("lm_head.weight", None)
    return shapes


def _write_weights(folder: Path, shapes: Mapping[str, torch.Size], precision: str, generator: torch.Generator) -> None:
    """One file a layer: never more than that in memory."""
    parts: dict[str, list[str]] = {}
    for name in shapes:
        layer = re.search(r"layers\.(\d+)\.", name)
        parts.setdefault(layer[1] if layer else "rest", []).append(name)
    places = {}
    for number, (_, names) in enumerate(parts.items(), 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        tensors = dict(pair for name in names for pair in _stored(name, shapes[name], precision, generator))
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / file, {"format": "pt"}
        )
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _stored(name: str, shape: torch.Size, precision: str, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    device = generator.device
    if len(shape) == 1:
        yield name, torch.ones(shape, dtype=torch.bfloat16)
    elif precision == "INT4" and LINEAR.match(name):
        rows, columns = shape
        words = torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=generator, device=device)
        scale = torch.full((rows, columns // GROUP), INT4_SCALE, dtype=torch.bfloat16)
        weight = INT4Weight(words.to(torch.int32), scale, (rows, columns), GROUP)
        to_checkpoint = FORMATS["INT4"].to_checkpoint
        assert to_checkpoint is not None
        for part, tensor in to_checkpoint(weight).items():
            yield f"{name.removesuffix('weight')}{part}", tensor
    else:
        yield name, torch.randn(shape, generator=generator, device=device).mul_(STANDARD_DEVIATION).bfloat16()


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """The shipped one, and for every other token a text of one or two characters, so that lengths of answers differ."""
    source = builtin_folder("tiny-adder", "BF16")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    for index in range(len(words), vocabulary):
        words[chr(FIRST_CHARACTER + index) * (1 + index % 2)] = index
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
