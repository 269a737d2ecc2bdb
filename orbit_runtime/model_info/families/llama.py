"""Llama: grouped-query attention and a gated MLP."""

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
    hidden = config["hidden_size"]
    config = {"num_key_value_heads": config["num_attention_heads"], **config}
    bias, mlp_bias = bool(config.get("attention_bias", False)), bool(config.get("mlp_bias", False))
    weights: list[Weight] = [*ends(config)]
    for layer in range(config["num_hidden_layers"]):
        place = Place(f"model.layers.{layer}.", layer)
        weights += gqa(place, config, bias=bias, out_bias=bias, qk_norm=False)
        weights += gated_mlp(place, hidden, config["intermediate_size"], "dense_mlp", bias=mlp_bias)
        weights += layer_norms(place, hidden)
    return Architecture(
        "llama", hidden, config["num_hidden_layers"], config["vocab_size"], config["num_attention_heads"],
        tuple(weights), gqa_cache(config), (*GQA_TARGETS, *MLP_TARGETS),
    )  # fmt: skip
