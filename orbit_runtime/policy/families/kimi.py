"""Kimi-K2 (text) and K2.5/K2.6: DeepSeek-V3's modules; the latter two also have a vision tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orbit_runtime.policy.families.mixture import DEEPSEEK_V3

REMOTE_CODE = ("auto_map", "architectures", "model_type")
"""Fields that refer to the model's own code, which is never run."""


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """transformers has no `kimi_k2`; inside `kimi_k25` it reads it as `deepseek_v3`."""
    kept = {key: value for key, value in config.items() if key not in REMOTE_CODE}
    return {"tie_word_embeddings": False} | kept | {"model_type": "deepseek_v3"}


def _inner_text(config: dict[str, Any]) -> dict[str, Any]:
    return _text(dict(config["text_config"]))


def _behind_prefix(name: str) -> str:
    return f"language_model.{name}"


KIMI_K2 = replace(DEEPSEEK_V3, language_config=_text)
KIMI_K25 = replace(
    DEEPSEEK_V3,
    language_config=_inner_text,
    checkpoint_name=_behind_prefix,
    left_out=(r"vision_tower\.", r"mm_projector\."),
)
"""Text only: the tower is not loaded, and images are not supported."""
