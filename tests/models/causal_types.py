"""Tiny configurations of the causal types that transformers builds, and those that no one is made for.

Belongs here: settings, and making a checkpoint. Does not belong here: any expectation.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from orbit_runtime.model_info.builtin_models import builtin_folder
from tests.integration.tiny_models import SIZES

MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
SLIDING = {"num_hidden_layers": 4, "sliding_window": 6, "head_dim": 16}
LAST_FULL = {**SLIDING, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
MLA = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32, "num_nextn_predict_layers": 0,
}  # fmt: skip
DSA = {**MLA, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 32, "mlp_layer_types": ["dense", "sparse"]}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
DELTA = {
    "num_hidden_layers": 4, "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
TYPES: dict[str, dict[str, Any]] = {
    "apertus": {}, "arcee": {}, "bitnet": {}, "cwm": {}, "helium": {"head_dim": 16}, "hyperclovax": {}, "jais2": {},
    "phi": {}, "persimmon": {}, "olmo": {}, "olmo2": {}, "stablelm": {}, "nanochat": {},
    "youtu": {**MLA, "tie_word_embeddings": False},
    "mistral": {"sliding_window": 6}, "ministral": LAST_FULL, "phi3": {"sliding_window": 6},
    "qwen2": {**SLIDING, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "olmo3": LAST_FULL, "smollm3": {"num_hidden_layers": 4}, "exaone4": LAST_FULL, "starcoder2": {"sliding_window": 6},
    "glm": {"head_dim": 16}, "glm4": {"head_dim": 16}, "seed_oss": {"head_dim": 16}, "ernie4_5": {"head_dim": 16},
    "gemma": {"head_dim": 16}, "gemma3_text": {**LAST_FULL, "tie_word_embeddings": True},
    "gemma2": {
        "head_dim": 16, "sliding_window": 6, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma4_text": {
        **LAST_FULL, "global_head_dim": 32, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 128,
    },
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 2.0}, "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, **LAST_FULL}, "hunyuan_v1_dense": {"head_dim": 16},
    "gpt2": {"n_positions": 512}, "gpt_bigcode": {"n_positions": 512},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_neox": {}, "gptj": {"rotary_dim": 8, "n_positions": 512}, "biogpt": {}, "bloom": {}, "falcon": {},
    "codegen": {"rotary_dim": 8, "n_positions": 512, "n_ctx": 512}, "ctrl": {"dff": 96, "n_positions": 512},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "diffllama": {}, "nemotron": {"head_dim": 16}, "doge": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 48}, "mixtral": LOCAL, "olmoe": EXPERTS,
    "flex_olmo": EXPERTS, "granitemoe": LOCAL, "granitemoeshared": {**LOCAL, "shared_intermediate_size": 48},
    "phimoe": LOCAL, "deepseek_v2": MLA, "glm4_moe_lite": MLA, "glm_moe_dsa": DSA, "deepseek_v32": DSA,
    "dots1": {**{key: value for key, value in MLA.items() if "rank" not in key and "head_dim" not in key}},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "minimax_m2": {**LOCAL, "head_dim": 16}, "afmoe": {**EXPERTS, "head_dim": 16}, "hunyuan_v1_moe": {
        "head_dim": 16, "num_experts": 4, "moe_topk": 2,
    },
    "llama4_text": {"intermediate_size_mlp": 96, "head_dim": 16, "moe_layers": []},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "recurrent_gemma": {"num_hidden_layers": 3, "head_dim": 16, "lru_width": 64, "attention_window_size": 8},
    "granitemoehybrid": {
        **MAMBA, **LOCAL, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 96,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1], "attn_rotary_emb": 8},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128, "head_dim": 16, "lm_head_multiplier": 0.5},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "moe"], "num_hidden_layers": 4, "mamba_num_heads": 4,
        "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 8, "head_dim": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2,
        "use_mamba_kernels": False,
    },
    "mamba": {"state_size": 8}, "falcon_mamba": {"state_size": 8},
    "mamba2": {"state_size": 16, "num_heads": 4, "head_dim": 32, "n_groups": 1, "chunk_size": 8},
    "minimax": {**LOCAL, "head_dim": 16, "block_size": 8, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32},
    "laguna": {}, "mellum": {}, "ministral3": {}, "granite_swa": {}, "granitemoe_swa": LOCAL, "xglm": {},
    "hy_v3": EXPERTS,
    "cohere2_moe": EXPERTS, "exaone_moe": EXPERTS, "solar_open": EXPERTS, "mimo_v2_flash": {}, "aria_text": {},
    "jetmoe": LOCAL, "axk1": MLA, "axk2": DSA, "vaultgemma": {"head_dim": 16}, "gpt_neox_japanese": {},
    "qwen3_5_text": DELTA, "qwen3_5_moe_text": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32},
}  # fmt: skip
"""Type → settings beside the common sizes. Sequences are longer than the windows."""
TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
BLOCKS = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {**TOWER, "model_type": "siglip_vision_model"}),
    "mistral3": ("mistral", {**TOWER, "model_type": "pixtral"}),
    "qwen3_5": ("qwen3_5_text", BLOCKS),
    "qwen3_5_moe": ("qwen3_5_moe_text", BLOCKS),
}
"""Types with a vision tower → the type of their text part, and the tower's settings."""
TYPES |= {name: TYPES[text] for name, (text, _) in VISION.items()}


LEFT_OUT: dict[str, str] = {
    "encoders: a token sees later ones": (
        "bert bert-generation big_bird camembert cpmant data2vec-text electra ernie megatron-bert reformer rembert "
        "roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod"
    ),
    "half of an encoder and a decoder": (
        "bart bigbird_pegasus blenderbot blenderbot-small blt marian mbart moshi musicgen musicgen_melody mvp pegasus "
        "plbart prophetnet trocr whisper"
    ),
    "beside another modality, whose text part has a type of its own": (
        "emu3 fuyu gemma3n gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant gemma4_unified_text "
        "git got_ocr2 llama4 minimax_m3_vl_text mllama phi4_multimodal qwen4_exp"
    ),
    "a class or configuration of another type in this table": "gpt-sw3",
    "a state outside transformers' cache": "openai-gpt rwkv xlstm",
    "its logits are not those of its output layer": "modernbert-decoder",
    "no small configuration is made yet": (
        "cohere_compass_text dbrx gemma3n_text hrm_text hy_v4 inkling_text kimi_linear longcat_flash minicpm3 mpt "
        "olmo_hybrid qwen4_exp_text zamba zamba2 zaya"
    ),
}
"""Why, and the types that no checkpoint is made of."""


def make_type(folder: Path, name: str, **changed: Any) -> Path:
    """A BF16 checkpoint as transformers saves it, with the tokenizer of the shipped model. `changed`: settings."""
    settings, kind = copy.deepcopy(SIZES | TYPES.get(name, {}) | changed), AutoModelForCausalLM
    if name in VISION:
        text, vision = copy.deepcopy(VISION[name])
        settings = {"text_config": settings | {"model_type": text}, "vision_config": vision}
        settings["tie_word_embeddings"] = name == "gemma3"
        kind = AutoModelForImageTextToText
    config = AutoConfig.for_model(name, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind.from_config(config)
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.05)
            elif "norm" in key:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    if name == "mistral3":
        # As Mistral Small is published: with a head of its own, and no word of it where the type ties by default.
        told = json.loads((folder / "config.json").read_text())
        del told["tie_word_embeddings"]
        (folder / "config.json").write_text(json.dumps(told))
    for path in builtin_folder("tiny-adder", "BF16").iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(path, folder / path.name)
    return folder
