"""DeepSeek-V3 and similar models: latent attention (MLA), a shared expert, a sigmoid router with a bias.

`kv_b_proj` is not adapted by default: engines fold it into the query and the output while decoding.
"""

from __future__ import annotations

from collections.abc import Iterator

from orbit_runtime.model_info.families.blocks import (
    MLP_TARGETS,
    Config,
    WeightPlace,
    besides_attention,
    ends,
    mtp_extras,
)  # fmt: skip
from orbit_runtime.model_info.weights import Architecture, KVCacheSize, Weight


def describe(config: Config, prefix: str = "") -> Architecture:
    layers, at = config["num_hidden_layers"], f"{prefix}model."
    weights: list[Weight] = [*ends(config, at, f"{prefix}lm_head.")]
    for layer in range(layers):
        dense = layer < config["first_k_dense_replace"]
        weights += _layer(WeightPlace(f"{at}layers.{layer}.", layer), config, dense=dense)
    for extra in range(layers, layers + config.get("num_nextn_predict_layers", 0)):
        place = WeightPlace(f"{at}layers.{extra}.", None, "mtp")
        weights += [*_layer(place, config, dense=False), *mtp_extras(place, config)]
    query = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj") if config.get("q_lora_rank") else ("q_proj",)
    targets = (*query, "o_proj", *MLP_TARGETS)
    latent = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    widest = max(config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"])
    own = 4 * layers * config["num_attention_heads"] * widest
    return Architecture(
        "deepseek_v3", config["hidden_size"], layers, config["vocab_size"], config["num_attention_heads"],
        tuple(weights), KVCacheSize(layers * latent * 2, own_bytes_per_token=own), targets,
        num_experts=config["n_routed_experts"], experts_per_token=config["num_experts_per_tok"],
    )  # fmt: skip


def _mla(place: WeightPlace, config: Config) -> Iterator[Weight]:
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    rank, wide = config.get("q_lora_rank"), heads * (nope + rope)
    if rank:
        yield place.linear("self_attn.q_a_proj", rank, hidden, "attention", "self_attn.in", split=False)
        yield place.plain("self_attn.q_a_layernorm.weight", (rank,))
        yield place.linear("self_attn.q_b_proj", wide, rank, "attention", "self_attn.q_latent")
    else:
        yield place.linear("self_attn.q_proj", wide, hidden, "attention", "self_attn.in")
    yield place.linear("self_attn.kv_a_proj_with_mqa", latent + rope, hidden, "attention", "self_attn.in", split=False)
    yield place.plain("self_attn.kv_a_layernorm.weight", (latent,))
    yield place.linear("self_attn.kv_b_proj", heads * (nope + value), latent, "attention", "self_attn.kv_latent")
    yield place.linear("self_attn.o_proj", hidden, heads * value, "attention", "self_attn.out")


def _layer(place: WeightPlace, config: Config, *, dense: bool) -> Iterator[Weight]:
    yield from _mla(place, config)
    yield from besides_attention(place, config, dense=dense)
