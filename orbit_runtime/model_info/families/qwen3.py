"""Qwen3, dense: grouped-query attention with normed queries and keys."""

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
)  # fmt: skip
from orbit_runtime.model_info.weights import Architecture, Weight


def describe(config: Config) -> Architecture:
    hidden, bias = config["hidden_size"], bool(config.get("attention_bias", False))
    weights: list[Weight] = [*ends(config)]
    for layer in range(config["num_hidden_layers"]):
        place = Place(f"model.layers.{layer}.", layer)
        weights += gqa(place, config, bias=bias, out_bias=bias, qk_norm=True)
        weights += gated_mlp(place, hidden, config["intermediate_size"], "dense_mlp")
        weights += layer_norms(place, hidden)
    return Architecture(
        "qwen3", hidden, config["num_hidden_layers"], config["vocab_size"], config["num_attention_heads"],
        tuple(weights), gqa_cache(config), (*GQA_TARGETS, *MLP_TARGETS),
    )  # fmt: skip
