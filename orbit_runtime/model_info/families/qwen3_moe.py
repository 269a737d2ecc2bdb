"""Qwen3-MoE: attention as in Qwen3, a softmax router, no shared expert."""

from __future__ import annotations

from orbit_runtime.model_info.families.blocks import (
    GQA_TARGETS,
    MLP_TARGETS,
    Config,
    Place,
    ends,
    gated_mlp,
    gqa,
    gqa_cache,
    layer_norms,
    routed_experts,
    router,
)  # fmt: skip
from orbit_runtime.model_info.weights import Architecture, Weight


def describe(config: Config) -> Architecture:
    # Published files use `num_experts`, those written by transformers 5 `num_local_experts`.
    hidden, experts = config["hidden_size"], config.get("num_local_experts") or config["num_experts"]
    bias = bool(config.get("attention_bias", False))
    weights: list[Weight] = [*ends(config)]
    for layer in range(config["num_hidden_layers"]):
        place = Place(f"model.layers.{layer}.", layer)
        weights += gqa(place, config, bias=bias, out_bias=bias, qk_norm=True)
        weights += layer_norms(place, hidden)
        sparse = layer not in config.get("mlp_only_layers", ()) and (layer + 1) % config["decoder_sparse_step"] == 0
        if sparse and experts:
            weights += router(place, hidden, experts, correction=False)
            weights += routed_experts(place, hidden, config["moe_intermediate_size"], experts)
        else:
            weights += gated_mlp(place, hidden, config["intermediate_size"], "dense_mlp")
    return Architecture(
        "qwen3_moe", hidden, config["num_hidden_layers"], config["vocab_size"], config["num_attention_heads"],
        tuple(weights), gqa_cache(config), (*GQA_TARGETS, *MLP_TARGETS),
        num_experts=experts, experts_per_token=config["num_experts_per_tok"],
    )  # fmt: skip
