"""The parts that families share: grouped-query attention, gated MLPs, routed experts, embedding and head.

Shapes of linears are `[out, in]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orbit_runtime.model_info.weights import EXPERT, KVCacheSize, Role, Weight

Config = Mapping[str, Any]
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
GQA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """The position of weights: a layer's prefix, its number, and the role of all of them if it is fixed (MTP)."""

    prefix: str
    layer: int | None
    fixed: Role | None = None

    def linear(
        self, name: str, out: int, into: int, role: Role, source: str, *, target: str = "", split: bool = True
    ) -> Weight:
        """`source`: name of the input within the layer."""
        leaf = target or name.rpartition(".")[2]
        return Weight(
            f"{self.prefix}{name}.weight", (out, into), self.fixed or role, self.layer,
            input=self.prefix + source, target=leaf, is_split=split,
        )  # fmt: skip

    def expert(self, name: str, out: int, into: int, count: int, source: str, *, target: str = "") -> Weight:
        """The same linear for every expert, one tensor each."""
        return Weight(
            f"{self.prefix}{name}.weight", (out, into), self.fixed or "routed_expert", self.layer, count,
            input=self.prefix + source, target=target or name.rpartition(".")[2],
        )  # fmt: skip

    def plain(
        self, name: str, shape: tuple[int, ...], role: Role = "norm", *, dtype: str = "BF16", split: bool = False
    ) -> Weight:
        return Weight(self.prefix + name, shape, self.fixed or role, self.layer, dtype=dtype, is_split=split)


def ends(config: Config, prefix: str = "model.", head: str = "lm_head.") -> Iterator[Weight]:
    """Embedding, final norm and head (no head if it is tied to the embedding)."""
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    yield Weight(f"{prefix}embed_tokens.weight", (vocabulary, hidden), "embedding")
    yield Weight(f"{prefix}norm.weight", (hidden,), "norm", is_split=False)
    if not config.get("tie_word_embeddings", False):
        yield Weight(f"{head}weight", (vocabulary, hidden), "head", input=f"{prefix}out", target="lm_head")


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def gqa(place: WeightPlace, config: Config, *, bias: bool, out_bias: bool, qk_norm: bool) -> Iterator[Weight]:
    """Grouped-query attention."""
    hidden, size = config["hidden_size"], head_dim(config)
    wide, narrow = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    for name, out in (("q_proj", wide), ("k_proj", narrow), ("v_proj", narrow)):
        yield place.linear(f"self_attn.{name}", out, hidden, "attention", "self_attn.in")
        if bias:
            yield place.plain(f"self_attn.{name}.bias", (out,), "attention", split=True)
    yield place.linear("self_attn.o_proj", hidden, wide, "attention", "self_attn.out")
    if out_bias:
        yield place.plain("self_attn.o_proj.bias", (hidden,), "attention")
    if qk_norm:
        yield place.plain("self_attn.q_norm.weight", (size,))
        yield place.plain("self_attn.k_norm.weight", (size,))


def layer_norms(place: WeightPlace, hidden: int) -> Iterator[Weight]:
    yield place.plain("input_layernorm.weight", (hidden,))
    yield place.plain("post_attention_layernorm.weight", (hidden,))


def gated_mlp(
    place: WeightPlace, hidden: int, inner: int, role: Role, *, name: str = "mlp", bias: bool = False
) -> Iterator[Weight]:
    """gate, up and down."""
    for leaf, out, into, source in (
        ("gate_proj", inner, hidden, "in"),
        ("up_proj", inner, hidden, "in"),
        ("down_proj", hidden, inner, "inner"),
    ):
        yield place.linear(f"{name}.{leaf}", out, into, role, f"{name}.{source}")
        if bias:
            yield place.plain(f"{name}.{leaf}.bias", (out,), role, split=leaf != "down_proj")


def routed_experts(place: WeightPlace, hidden: int, inner: int, count: int) -> Iterator[Weight]:
    """gate, up and down of every expert. Experts of one layer share the input; each has its own activations."""
    at = f"mlp.experts.{EXPERT}"
    yield place.expert(f"{at}.gate_proj", inner, hidden, count, "mlp.experts.in")
    yield place.expert(f"{at}.up_proj", inner, hidden, count, "mlp.experts.in")
    yield place.expert(f"{at}.down_proj", hidden, inner, count, "mlp.experts.inner")


def router(place: WeightPlace, hidden: int, count: int, *, correction: bool) -> Iterator[Weight]:
    yield place.plain("mlp.gate.weight", (count, hidden), "router")
    if correction:
        yield place.plain("mlp.gate.e_score_correction_bias", (count,), "router", dtype="F32")


def besides_attention(place: WeightPlace, config: Config, *, dense: bool) -> Iterator[Weight]:
    """What a layer of DeepSeek-V3 or GLM-4.5 has besides attention: norms, a dense MLP or routed and shared experts."""
    hidden, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    yield from layer_norms(place, hidden)
    if dense:
        yield from gated_mlp(place, hidden, config["intermediate_size"], "dense_mlp")
        return
    yield from router(place, hidden, experts, correction=True)
    yield from routed_experts(place, hidden, inner, experts)
    shared = inner * config["n_shared_experts"]
    yield from gated_mlp(place, hidden, shared, "shared_expert", name="mlp.shared_experts")


def mtp_extras(place: WeightPlace, config: Config) -> Iterator[Weight]:
    """Weights that a DeepSeek-style multi-token-prediction layer has in addition to those of an ordinary layer."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield place.plain("embed_tokens.weight", (vocabulary, hidden), split=True)
    yield place.linear("eh_proj", hidden, 2 * hidden, "mtp", "eh.in")
    for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight"):
        yield place.plain(name, (hidden,))
    yield place.plain("shared_head.head.weight", (vocabulary, hidden), split=True)


def gqa_cache(config: Config) -> KVCacheSize:
    heads = config["num_key_value_heads"]
    return KVCacheSize(2 * config["num_hidden_layers"] * heads * head_dim(config) * 2, heads=heads)
