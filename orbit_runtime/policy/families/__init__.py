"""Model families: checkpoint names, experts and special layers that transformers' modules do not describe.

Belongs here: one file per family that differs, and the table.
Does not belong here: sizes and roles of weights (`model_info.families`), arithmetic that all families share.

A family without a row is built from transformers' modules alone, with the names of `published`.
"""

from __future__ import annotations

from orbit_runtime.policy.families import deepseek_v4, gpt_oss, mixture
from orbit_runtime.policy.families.family import DENSE, Family

FAMILIES: dict[str, Family] = {
    "qwen3_moe": mixture.QWEN3_MOE,
    "glm4_moe": mixture.GLM4_MOE,
    "deepseek_v3": mixture.DEEPSEEK_V3,
    "kimi_k2": mixture.KIMI_K2,
    "kimi_k25": mixture.KIMI_K25,
    "gpt_oss": gpt_oss.GPT_OSS,
    "deepseek_v4": deepseek_v4.DEEPSEEK_V4,
}
"""Families by the configuration's `model_type`."""


def find_family(model_type: str | None) -> Family:
    """`DENSE` for a type without a row: Llama, Qwen3 and every other model with transformers' own names."""
    return FAMILIES.get(model_type or "", DENSE)


__all__ = ["DENSE", "FAMILIES", "Family", "find_family"]
