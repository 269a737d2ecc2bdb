"""gpt-oss: attention with biases and sinks, every second layer a sliding window; all experts of a layer in one tensor.

Shapes are the checkpoint's, `[out, in]`; transformers holds the experts transposed.
"""

from __future__ import annotations

from orbit_runtime.model_info.families.blocks import (
    GQA_TARGETS,
    Config,
    WeightPlace,
    ends,
    gqa,
    head_dim,
    layer_norms,
)  # fmt: skip
from orbit_runtime.model_info.weights import Architecture, KVCacheSize, Weight


def describe(config: Config) -> Architecture:
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    weights: list[Weight] = [*ends(config)]
    for layer in range(config["num_hidden_layers"]):
        place = WeightPlace(f"model.layers.{layer}.", layer)
        weights += gqa(place, config, bias=True, out_bias=True, qk_norm=False)
        weights += layer_norms(place, hidden)
        weights += [
            place.plain("self_attn.sinks", (config["num_attention_heads"],), "attention", split=True),
            place.plain("mlp.router.weight", (experts, hidden), "router"),
            place.plain("mlp.router.bias", (experts,), "router"),
        ]
        for name, out, into, source in (
            ("gate_up_proj", 2 * inner, hidden, "in"),
            ("down_proj", hidden, inner, "inner"),
        ):
            at = f"model.layers.{layer}.mlp.experts."
            weights += [
                Weight(at + name, (out, into), "routed_expert", layer, experts, input=at + source, target=name),
                Weight(f"{at}{name}_bias", (out,), "routed_expert", layer, experts),
            ]
    return Architecture(
        "gpt_oss", hidden, config["num_hidden_layers"], config["vocab_size"], config["num_attention_heads"],
        tuple(weights), _cache(config), (*GQA_TARGETS, "gate_up_proj", "down_proj"),
        num_experts=experts, experts_per_token=config["num_experts_per_tok"],
    )  # fmt: skip


def _cache(config: Config) -> KVCacheSize:
    heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
    kinds = config.get("layer_types") or ["sliding_attention", "full_attention"] * (layers // 2)
    one, sliding = 2 * heads * head_dim(config) * 2, kinds[:layers].count("sliding_attention")
    windows = one * sliding * config["sliding_window"]
    return KVCacheSize(one * (layers - sliding), windows, heads, own_bytes_per_token=one * layers)
