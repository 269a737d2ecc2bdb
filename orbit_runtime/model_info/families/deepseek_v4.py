"""DeepSeek-V4: one shared key/value head, compressed attention (CSA, HCA), hyper-connections, hash-routed first layers.

Names are the checkpoint's own (`layers.0.attn.wq_a`); `target` is transformers' name for the module.
"""

from __future__ import annotations

from collections.abc import Iterator

from orbit_runtime.model_info.families.blocks import MLP_TARGETS, Config, WeightPlace
from orbit_runtime.model_info.weights import EXPERT, Architecture, KVCacheSize, Weight

CSA, HCA = 4, 128
"""Tokens per compressed entry; 0 means a sliding window only."""
ENTRY_BYTES = 584
"""A cached entry of SGLang: 448 FP8 values, 64 rotary ones in BF16, 8 bytes of scales and padding."""
INDEX_ENTRY_BYTES = 132
EXPERT_NAMES = (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))


def describe(config: Config) -> Architecture:
    layers, hidden, vocabulary = config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
    streams, ratios = config["hc_mult"], config["compress_ratios"]
    if len(ratios) < layers:
        raise ValueError(f"{len(ratios)} compress_ratios for {layers} layers")
    weights: list[Weight] = [
        Weight("embed.weight", (vocabulary, hidden), "embedding"),
        Weight("norm.weight", (hidden,), "norm", is_split=False),
        Weight("head.weight", (vocabulary, hidden), "head", input="out", target="lm_head"),
        *_hyper_head(WeightPlace("", None), hidden, streams),
    ]
    for layer in range(layers):
        place = WeightPlace(f"layers.{layer}.", layer)
        weights += _layer(place, config, ratios[layer], hashed=layer < config["num_hash_layers"])
    for extra in range(config.get("num_nextn_predict_layers", 0)):
        place = WeightPlace(f"mtp.{extra}.", None, "mtp")
        weights += [*_layer(place, config, 0, hashed=False), *_mtp(place, hidden), *_hyper_head(place, hidden, streams)]
    return Architecture(
        "deepseek_v4", hidden, layers, vocabulary, config["num_attention_heads"], tuple(weights),
        _cache(config), ("q_a_proj", "kv_proj", "q_b_proj", "o_b_proj", *MLP_TARGETS),
        num_experts=config["n_routed_experts"], experts_per_token=config["num_experts_per_tok"], streams=streams,
    )  # fmt: skip


def _cache(config: Config) -> KVCacheSize:
    layers = config["num_hidden_layers"]
    ratios = list(config["compress_ratios"][:layers])
    per_token = ratios.count(CSA) * (ENTRY_BYTES + INDEX_ENTRY_BYTES) / CSA + ratios.count(HCA) * ENTRY_BYTES / HCA
    return KVCacheSize(per_token, config["sliding_window"] * layers * ENTRY_BYTES)


def _layer(place: WeightPlace, config: Config, ratio: int, *, hashed: bool) -> Iterator[Weight]:
    hidden, streams = config["hidden_size"], config["hc_mult"]
    yield from _attention(place, config)
    if ratio:
        yield from _compressor(place, "attn.compressor.", hidden, config["head_dim"], ratio)
    if ratio == CSA:
        yield from _indexer(place, config)
    yield from _experts(place, config, hashed=hashed)
    for name in ("attn_norm.weight", "ffn_norm.weight"):
        yield place.plain(name, (hidden,))
    mixed = (2 + streams) * streams
    for name in ("hc_attn", "hc_ffn"):
        yield place.plain(f"{name}_fn", (mixed, streams * hidden), "other", dtype="F32")
        yield place.plain(f"{name}_base", (mixed,), "other", dtype="F32")
        yield place.plain(f"{name}_scale", (3,), "other", dtype="F32")


def _attention(place: WeightPlace, config: Config) -> Iterator[Weight]:
    hidden, size, rank = config["hidden_size"], config["head_dim"], config["q_lora_rank"]
    heads, groups, out_rank = config["num_attention_heads"], config["o_groups"], config["o_lora_rank"]

    def linear(name: str, out: int, into: int, source: str, target: str, *, split: bool = True) -> Weight:
        return place.linear(f"attn.{name}", out, into, "attention", f"attn.{source}", target=target, split=split)

    yield linear("wq_a", rank, hidden, "in", "q_a_proj", split=False)
    yield linear("wq_b", heads * size, rank, "q_latent", "q_b_proj")
    yield linear("wkv", size, hidden, "in", "kv_proj", split=False)
    yield linear("wo_a", groups * out_rank, heads * size // groups, "heads", "o_a_proj")
    yield linear("wo_b", hidden, groups * out_rank, "out", "o_b_proj")
    yield place.plain("attn.q_norm.weight", (rank,))
    yield place.plain("attn.kv_norm.weight", (size,))
    yield place.plain("attn.attn_sink", (heads,), "attention", dtype="F32", split=True)


def _compressor(place: WeightPlace, at: str, hidden: int, size: int, ratio: int) -> Iterator[Weight]:
    """CSA compresses overlapping windows, hence twice the width."""
    wide = 2 * size if ratio == CSA else size
    for name in ("wkv", "wgate"):
        yield place.plain(f"{at}{name}.weight", (wide, hidden), "attention")
    yield place.plain(f"{at}ape", (ratio, wide), "attention", dtype="F32")
    yield place.plain(f"{at}norm.weight", (size,))


def _indexer(place: WeightPlace, config: Config) -> Iterator[Weight]:
    heads, size = config["index_n_heads"], config["index_head_dim"]
    source = "attn.q_latent"
    yield place.linear(
        "attn.indexer.wq_b", heads * size, config["q_lora_rank"], "attention", source, target="indexer.q_b_proj",
        split=False,
    )  # fmt: skip
    yield place.plain("attn.indexer.weights_proj.weight", (heads, config["hidden_size"]), "attention")
    yield from _compressor(place, "attn.indexer.compressor.", config["hidden_size"], size, CSA)


def _experts(place: WeightPlace, config: Config, *, hashed: bool) -> Iterator[Weight]:
    hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    yield place.plain("ffn.gate.weight", (count, hidden), "router")
    if hashed:
        shape = (config["vocab_size"], config["num_experts_per_tok"])
        yield place.plain("ffn.gate.tid2eid", shape, "router", dtype="I64")
    else:
        yield place.plain("ffn.gate.bias", (count,), "router", dtype="F32")
    for name, target in EXPERT_NAMES:
        out, into = (hidden, inner) if name == "w2" else (inner, hidden)
        source = "inner" if name == "w2" else "in"
        yield place.expert(f"ffn.experts.{EXPERT}.{name}", out, into, count, f"ffn.experts.{source}", target=target)
        yield place.linear(
            f"ffn.shared_experts.{name}", out, into, "shared_expert", f"ffn.shared_experts.{source}", target=target
        )


def _mtp(place: WeightPlace, hidden: int) -> Iterator[Weight]:
    for name in ("e_proj", "h_proj"):
        yield place.linear(name, hidden, hidden, "mtp", name)
    for name in ("enorm.weight", "hnorm.weight", "norm.weight"):
        yield place.plain(name, (hidden,))


def _hyper_head(place: WeightPlace, hidden: int, streams: int) -> Iterator[Weight]:
    yield place.plain("hc_head_fn", (streams, streams * hidden), "other", dtype="F32")
    yield place.plain("hc_head_base", (streams,), "other", dtype="F32")
    yield place.plain("hc_head_scale", (1,), "other", dtype="F32")
