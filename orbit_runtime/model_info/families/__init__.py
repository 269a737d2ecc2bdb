"""Model families: a Hugging Face configuration → every weight, default adapter targets, size of the KV cache.

Belongs here: the table, and one file for families of one kind of layer. Does not belong here: formats (`weights`),
cards, types that transformers' modules describe (`module_tree`), torch.

A row says from config.json alone which tensors there must be. Cards, which have no headers, are made of rows, and a
checkpoint of such a family that lacks a tensor is refused by its name; a record tells only what headers list. Of these
types gpt-oss, DeepSeek-V4 and Kimi also store what transformers' modules do not describe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.families import deepseek_v3, deepseek_v4, gpt_oss, grouped, kimi
from orbit_runtime.model_info.settings import DAMAGED
from orbit_runtime.model_info.weights import Architecture

Describe = Callable[[Mapping[str, Any]], Architecture]

FAMILIES: dict[str, Describe] = {
    "qwen3": grouped.qwen3,
    "qwen3_moe": grouped.qwen3_moe,
    "llama": grouped.llama,
    "glm4_moe": grouped.glm4_moe,
    "deepseek_v3": deepseek_v3.describe,
    "kimi_k2": kimi.describe,
    "kimi_k25": kimi.describe,
    "deepseek_v4": deepseek_v4.describe,
    "gpt_oss": gpt_oss.describe,
}
"""Families by the configuration's `model_type`."""
_NUMBER = re.compile(r"num_.*|n_.*|.*_size|.*_dim|.*_rank")
"""Fields that hold integers, in every family."""


def describe(config: Mapping[str, Any], *, where: str = "config.json") -> Architecture:
    """Raises `ModelError` if the family is not in the table, or the configuration lacks a field."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ModelError(
            f"the planner does not know models of type {kind!r}",
            where=where,
            fix=f"it knows {', '.join(FAMILIES)}",
        )
    for name, value in {**config, **(config.get("text_config") or {})}.items():
        if _NUMBER.fullmatch(name) and isinstance(value, (str, float, dict)):
            raise ModelError(f"{name} is {value!r}, not a whole number", where=where, fix=DAMAGED)
    try:
        return FAMILIES[kind](config)
    except KeyError as missing:
        raise ModelError(f"the configuration of a {kind} has no {missing}", where=where) from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"the configuration of this {kind} is not consistent: {error}", where=where) from None
