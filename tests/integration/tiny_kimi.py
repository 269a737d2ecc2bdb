"""A tiny Kimi-K2.6 as it is published: INT4 experts behind a vision tower, and a tokenizer in tiktoken's format.

Names, shapes and fields are those of moonshotai/Kimi-K2.6's files; sizes, weights and vocabulary are small.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from orbit_runtime.model_info.families import kimi
from tests.integration.tiny_families import make_family

TEXTS = Path(__file__).parents[2] / "docs"
RANKS = 400
RESERVED = 256
NAMED = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 6: "<|start_header_id|>",
    10: "<|im_system|>", 17: "<|im_middle|>", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>",
    11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>", 13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>", 15: "<|tool_call_end|>",
    21: "<|media_pad|>", 22: "<think>", 23: "</think>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
"""Tokens that tokenizer_config.json names, by their place after the ranks; the others are reserved without a word."""
IM_END = 2
TEMPLATE = """{%- macro content(message) -%}{{ message['content'] }}{%- endmacro -%}
{%- macro calls(message) -%}<|tool_calls_section_begin|>{%- for call in message['tool_calls'] -%}
<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>{{ call['function']['arguments'] | tojson -}}
<|tool_call_end|>{%- endfor -%}<|tool_calls_section_end|>{%- endmacro -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>
{%- if tools_ts_str -%}{{ tools_ts_str }}{%- else -%}{{ tools | tojson(separators=(',', ':')) }}{%- endif -%}
<|im_end|>{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}<|im_user|>{%- elif message['role'] == 'assistant' -%}<|im_assistant|>
{%- else -%}<|im_system|>{%- endif -%}{{ message.get('name') or message['role'] }}<|im_middle|>
{%- if message['role'] == 'tool' -%}{{ '## Return of ' ~ message.tool_call_id ~ '\n' }}{%- endif -%}
{{ content(message) }}{%- if message.get('tool_calls') -%}{{ calls(message) }}{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|><think></think>{%- endif -%}"""
TOWER = {
    "init_pos_emb_height": 8, "init_pos_emb_width": 8, "init_pos_emb_time": 4, "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool", "mm_projector_type": "patchmerger", "patch_size": 14, "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu", "projector_ln_eps": 1e-05, "video_attn_type": "spatial_temporal",
    "text_hidden_size": 64, "mm_hidden_size": 32,
}  # fmt: skip
YARN = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
THETA = 50000.0
UNPACKED = (
    "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
    "re:vision_tower.*", "re:mm_projector.*",
)  # fmt: skip
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
"""Under these names in transformers and SGLang; the published file has `vt_` before them."""


def make_kimi(
    folder: Path, *, seed: int = 0, layout: str = "INT4", unpacked: Sequence[str] = UNPACKED
) -> tuple[Path, Path]:
    """`(published, plain)`: the checkpoint, and its language model in BF16 as transformers' DeepSeek-V3 loads it.

    Args:
        layout: of the routed experts; nothing else is packed.
        unpacked: `ignore` of the quantisation.
    """
    sizes = {"vocab_size": RANKS + RESERVED + 8, "intermediate_size": 128, "moe_intermediate_size": 64}
    packed, plain = make_family(folder, "kimi_k25", layout, seed=seed, sizes=sizes)
    config = json.loads((packed / "config.json").read_text())
    text = config["text_config"] | {
        "architectures": ["DeepseekV3ForCausalLM"], "moe_layer_freq": 1, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "ep_size": 1, "rope_scaling": YARN, "rope_theta": THETA,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    }  # fmt: skip
    del text["rope_parameters"]
    text["quantization_config"]["ignore"] = list(unpacked)
    whole = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k25.KimiK25Config",
            "AutoModel": "modeling_kimi_k25.KimiK25ForConditionalGeneration",
        },
        "model_type": "kimi_k25", "dtype": "bfloat16", "ignore_index": -100, "tie_word_embeddings": False,
        "bos_token_id": RANKS, "eos_token_id": RANKS + 1, "pad_token_id": RANKS + 255,
        "media_placeholder_token_id": RANKS + 21, "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>", "text_config": text,
        "vision_config": TOWER | SIZES | {f"vt_{name}": size for name, size in SIZES.items()},
    }  # fmt: skip
    (packed / "config.json").write_text(json.dumps(whole, indent=2))
    described = json.loads((plain / "config.json").read_text())
    named = {name: value for name, value in YARN.items() if name != "type"}
    described["rope_parameters"] = named | {"rope_type": "yarn", "rope_theta": THETA}
    (plain / "config.json").write_text(json.dumps(described))
    # Only routed experts are packed.
    experts = {name: each for name, each in load_file(packed / "model.safetensors").items() if ".mlp.experts." in name}
    others = {
        f"language_model.{name}": each
        for name, each in load_file(plain / "model.safetensors").items()
        if ".mlp.experts." not in name
    }
    save_file(experts | others | _tower(whole), packed / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (packed / name).unlink(missing_ok=True)
    write_tokenizer(packed)
    return packed, plain


def _tower(config: Mapping[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        weight.name: torch.randn(weight.shape, generator=generator).mul(0.05).bfloat16()
        for weight in kimi.describe(dict(config)).weights
        if not weight.name.startswith("language_model.")
    }


def write_tokenizer(folder: Path) -> None:
    """`tiktoken.model`, and settings that refer to the publisher's own code, which is not there."""
    ranks = train_ranks()
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    added = {
        str(len(ranks) + place): {
            "content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": content not in ("<think>", "</think>"),
        }
        for place, content in NAMED.items()
    }  # fmt: skip
    settings = {
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>"],
        "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False, "model_max_length": 1000000000000000019884624838656,
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(
        json.dumps({"max_length": 262144, "eos_token_id": len(ranks) + IM_END})
    )


def train_ranks() -> dict[bytes, int]:
    """The 256 bytes and merges that occur in this project's guides, in tiktoken's order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=RANKS, initial_alphabet=alphabet, show_progress=False)
    han = "训练大模型时基础权重保持冻结只训练适配器训练模型训练模型"
    tokenizer.train_from_iterator([path.read_text() for path in sorted(TEXTS.glob("*.md"))] + [han] * 50, trainer)
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    byte_of = {char: number for number, char in _byte_characters().items()}
    return {bytes(byte_of[char] for char in token): rank for rank, (token, _) in enumerate(by_id)}


def _byte_characters() -> dict[int, str]:
    """GPT-2's printable character of each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
