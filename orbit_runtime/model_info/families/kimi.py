"""Kimi-K2 (text) and K2.5/K2.6 (with a vision tower): DeepSeek-V3's layers under their own names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from orbit_runtime.model_info.families import deepseek_v3
from orbit_runtime.model_info.families.blocks import Config, WeightPlace
from orbit_runtime.model_info.weights import Architecture, Weight


def describe(config: Config) -> Architecture:
    if "text_config" not in config:
        return replace(deepseek_v3.describe(config), family="kimi_k2")
    text = {**config["text_config"]}
    # The tower's configuration says "tied", but the language model has a head of its own.
    text["tie_word_embeddings"] = bool(text.get("tie_word_embeddings", False))
    described = deepseek_v3.describe(text, "language_model.")
    vision = tuple(_vision(config["vision_config"], described.hidden_size))
    return replace(described, family="kimi_k2", weights=(*described.weights, *vision))


def _vision(config: Config, text_hidden: int) -> Iterator[Weight]:
    """MoonViT and the projector, by the checkpoint's names."""
    place = WeightPlace("", None, "vision")
    hidden, inner = (
        _first(config, "vt_hidden_size", "hidden_size"),
        _first(config, "vt_intermediate_size", "intermediate_size"),
    )
    layers, patch = _first(config, "vt_num_hidden_layers", "num_hidden_layers"), config["patch_size"]
    height, width = (
        _first(config, "init_pos_emb_height", "pos_emb_height"),
        _first(config, "init_pos_emb_width", "pos_emb_width"),
    )
    tower = "vision_tower.encoder."
    yield place.plain("vision_tower.patch_embed.proj.weight", (hidden, 3, patch, patch))
    yield place.plain("vision_tower.patch_embed.proj.bias", (hidden,))
    yield place.plain("vision_tower.patch_embed.pos_emb.weight", (height, width, hidden))
    for index in range(layers):
        at = f"{tower}blocks.{index}."
        for name, out, into in (
            ("wqkv", 3 * hidden, hidden), ("wo", hidden, hidden),
            ("mlp.fc0", inner, hidden), ("mlp.fc1", hidden, inner),
        ):  # fmt: skip
            yield place.linear(at + name, out, into, "vision", at + name)
            yield place.plain(f"{at}{name}.bias", (out,), split=True)
        for name in ("norm0", "norm1"):
            yield place.plain(f"{at}{name}.weight", (hidden,))
            yield place.plain(f"{at}{name}.bias", (hidden,))
    yield place.plain(f"{tower}final_layernorm.weight", (hidden,))
    yield place.plain(f"{tower}final_layernorm.bias", (hidden,))
    merged = hidden * config["merge_kernel_size"][0] * config["merge_kernel_size"][1]
    yield place.plain("mm_projector.pre_norm.weight", (hidden,))
    yield place.plain("mm_projector.pre_norm.bias", (hidden,))
    for name, out, into in (("proj.0", merged, merged), ("proj.2", text_hidden, merged)):
        yield place.linear(f"mm_projector.{name}", out, into, "vision", f"mm_projector.{name}")
        yield place.plain(f"mm_projector.{name}.bias", (out,), split=True)


def _first(config: Config, *names: str) -> int:
    """The checkpoint and transformers use different names for the same field."""
    for name in names:
        if name in config:
            return int(config[name])
    raise KeyError(names[0])
