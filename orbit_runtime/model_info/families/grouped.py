"""Llama, Qwen3, Qwen3-MoE and GLM-4.5: grouped-query attention, then a gated MLP or routed experts.

Llama       biases if the configuration says so
Qwen3       normed queries and keys
Qwen3-MoE   attention as in Qwen3, a softmax router, no shared expert
GLM-4.5     a shared expert, a sigmoid router with a correction bias, layers for several tokens at once (MTP)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from orbit_runtime.model_info.families.blocks import (
    GQA_TARGETS,
    MLP_TARGETS,
    Config,
    WeightPlace,
    besides_attention,
    ends,
    gated_mlp,
    gqa,
    gqa_cache,
    layer_norms,
    mtp_extras,
    routed_experts,
    router,
)  # fmt: skip
from orbit_runtime.model_info.weights import Architecture, Weight


def llama(config: Config) -> Architecture:
    hidden = config["hidden_size"]
    config = {"num_key_value_heads": config["num_attention_heads"], **config}
    return _dense("llama", hidden, config, qk_norm=False, mlp_bias=bool(config.get("mlp_bias", False)))


def qwen3(config: Config) -> Architecture:
    return _dense("qwen3", config["hidden_size"], config, qk_norm=True, mlp_bias=False)


def _dense(family: str, hidden: int, config: Config, *, qk_norm: bool, mlp_bias: bool) -> Architecture:
    bias = bool(config.get("attention_bias", False))
    weights: list[Weight] = [*ends(config)]
    for layer in range(config["num_hidden_layers"]):
        place = WeightPlace(f"model.layers.{layer}.", layer)
        weights += gqa(place, config, bias=bias, out_bias=bias, qk_norm=qk_norm)
        weights += gated_mlp(place, hidden, config["intermediate_size"], "dense_mlp", bias=mlp_bias)
        weights += layer_norms(place, hidden)
    return _architecture(family, config, weights)


def qwen3_moe(config: Config) -> Architecture:
    # Published files use `num_experts`, those written by transformers 5 `num_local_experts`.
    hidden, experts = config["hidden_size"], config.get("num_local_experts") or config["num_experts"]
    bias = bool(config.get("attention_bias", False))
    weights: list[Weight] = [*ends(config)]
    for layer in range(config["num_hidden_layers"]):
        place = WeightPlace(f"model.layers.{layer}.", layer)
        weights += gqa(place, config, bias=bias, out_bias=bias, qk_norm=True)
        weights += layer_norms(place, hidden)
        sparse = layer not in config.get("mlp_only_layers", ()) and (layer + 1) % config["decoder_sparse_step"] == 0
        if sparse and experts:
            weights += router(place, hidden, experts, correction=False)
            weights += routed_experts(place, hidden, config["moe_intermediate_size"], experts)
        else:
            weights += gated_mlp(place, hidden, config["intermediate_size"], "dense_mlp")
    described = _architecture("qwen3_moe", config, weights)
    return replace(described, num_experts=experts, experts_per_token=config["num_experts_per_tok"])


def glm4_moe(config: Config) -> Architecture:
    layers = config["num_hidden_layers"]
    weights: list[Weight] = [*ends(config)]
    for layer in range(layers):
        place = WeightPlace(f"model.layers.{layer}.", layer)
        weights += _glm4_layer(place, config, dense=layer < config["first_k_dense_replace"])
    for extra in range(layers, layers + config.get("num_nextn_predict_layers", 0)):
        place = WeightPlace(f"model.layers.{extra}.", None, "mtp")
        weights += [*_glm4_layer(place, config, dense=False), *mtp_extras(place, config)]
    described = _architecture("glm4_moe", config, weights)
    experts, chosen = config["n_routed_experts"], config["num_experts_per_tok"]
    return replace(described, num_experts=experts, experts_per_token=chosen)


def _glm4_layer(place: WeightPlace, config: Config, *, dense: bool) -> Iterator[Weight]:
    bias, normed = bool(config.get("attention_bias", False)), bool(config.get("use_qk_norm", False))
    yield from gqa(place, config, bias=bias, out_bias=False, qk_norm=normed)
    yield from besides_attention(place, config, dense=dense)


def _architecture(family: str, config: Config, weights: Sequence[Weight]) -> Architecture:
    return Architecture(
        family, config["hidden_size"], config["num_hidden_layers"], config["vocab_size"], config["num_attention_heads"],
        tuple(weights), gqa_cache(config), (*GQA_TARGETS, *MLP_TARGETS),
    )  # fmt: skip
