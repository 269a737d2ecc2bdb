"""GLM-4.5: grouped-query attention with biases, a shared expert, a sigmoid router with a correction bias."""

from __future__ import annotations

from collections.abc import Iterator

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
    mtp_extras,
    routed_experts,
    router,
)  # fmt: skip
from orbit_runtime.model_info.weights import Architecture, Weight


def describe(config: Config) -> Architecture:
    layers = config["num_hidden_layers"]
    weights: list[Weight] = [*ends(config)]
    for layer in range(layers):
        weights += _layer(Place(f"model.layers.{layer}.", layer), config, dense=layer < config["first_k_dense_replace"])
    for extra in range(layers, layers + config.get("num_nextn_predict_layers", 0)):
        place = Place(f"model.layers.{extra}.", None, "mtp")
        weights += [*_layer(place, config, dense=False), *mtp_extras(place, config)]
    return Architecture(
        "glm4_moe", config["hidden_size"], layers, config["vocab_size"], config["num_attention_heads"],
        tuple(weights), gqa_cache(config), (*GQA_TARGETS, *MLP_TARGETS),
        num_experts=config["n_routed_experts"], experts_per_token=config["num_experts_per_tok"],
    )  # fmt: skip


def _layer(place: Place, config: Config, *, dense: bool) -> Iterator[Weight]:
    hidden, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    bias, normed = bool(config.get("attention_bias", False)), bool(config.get("use_qk_norm", False))
    yield from gqa(place, config, bias=bias, out_bias=False, qk_norm=normed)
    yield from layer_norms(place, hidden)
    if dense:
        yield from gated_mlp(place, hidden, config["intermediate_size"], "dense_mlp")
        return
    yield from router(place, hidden, experts, correction=True)
    yield from routed_experts(place, hidden, inner, experts)
    shared = inner * config["n_shared_experts"]
    yield from gated_mlp(place, hidden, shared, "shared_expert", name="mlp.shared_experts")
