"""`config.json` as the examples' checkpoints have it, as far as SGLang reads it: the shipped cards, and what they leave
out because Orbit does not need it.

From memory of the published files, where a card does not say otherwise. Belongs here: configurations. Does not belong
here: asking anything about them.
"""

from __future__ import annotations

from typing import Any

from orbit_runtime.model_info.cards import load_card, repositories

ARCHITECTURES = {
    "kimi_k25": "KimiK25ForConditionalGeneration", "deepseek_v4": "DeepseekV4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM", "gpt_oss": "GptOssForCausalLM", "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
}  # fmt: skip
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
IGNORED = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
QUANTISATIONS: dict[str, dict[str, Any]] = {
    "INT4/32": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": IGNORED,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}}, "quantization_status": "compressed",
    },
    "FP8/128": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    },
    "FP8/128/E8M0": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    },
    "FP8/channel": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": FP8, "input_activations": TOKEN}},
    },
    "NVFP4/16": {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "kv_cache_scheme": {
            "num_bits": 8, "type": "float", "dynamic": False,
        },
        "config_groups": {"group_0": {
            "weights": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
            "input_activations": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
            "targets": ["Linear"],
        }},
    },
    "MXFP4/32": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True, "hidden_act": "silu",
        "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "o_groups": 8, "compress_rope_theta": 160000,
    },
    "glm4_moe": {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 18, "swiglu_limit": 7.0},
    "qwen3_moe": {"norm_topk_prob": True},
}  # fmt: skip
KIMI = {
    "architectures": ["DeepseekV3ForCausalLM"], "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.827, "max_position_embeddings": 262144,
    "rope_theta": 50000.0,
}  # fmt: skip


def published_config(repository: str) -> dict[str, Any]:
    card = load_card(repositories()[repository])
    formats = card["repositories"][repository]
    config = {**card["config"], "torch_dtype": "bfloat16", "max_position_embeddings": 131072}
    kind = config["model_type"]
    config = {**MORE.get(kind, {}), **config, "architectures": [ARCHITECTURES[kind]]}
    form = formats.get("linear", formats.get("routed_expert"))
    quantisation = {"quantization_config": QUANTISATIONS[form]} if form else {}
    if kind == "kimi_k25":
        return {**config, "text_config": {**KIMI, **config["text_config"], **quantisation}}
    return {**config, **quantisation}
