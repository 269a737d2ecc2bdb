"""Qwen3-MoE, GLM-4.5, DeepSeek-V3 and Kimi: separate gate, up and down tensors for each expert, `act(gate) * up`.

Routers, shared experts and attention are transformers' own modules over frozen linears. The routers of DeepSeek-V3 and
GLM-4.5 add their correction bias to the sigmoid scores only to choose experts, not to weigh them. Kimi-K2 (text) and
K2.5/K2.6 have DeepSeek-V3's modules; the latter two also have a vision tower.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orbit_runtime.policy.experts import Activation, gated
from orbit_runtime.policy.families.family import ExpertForm, Family, Projection, hidden, inner
from orbit_runtime.policy.routing import sigmoid_of_chosen, softmax_then_chosen

KV_B_PROJ = {"kv_b_proj": "engines fold this layer into the query and the output while they decode"}


def _activation(module: Any) -> Activation:
    return gated(module.act_fn, getattr(module, "limit", None))


PER_EXPERT = ExpertForm(
    (
        Projection("gate_proj", inner, hidden),
        Projection("up_proj", inner, hidden),
        Projection("down_proj", hidden, inner),
    ),
    _activation,
)

QWEN3_MOE = Family(PER_EXPERT, gate_weights=softmax_then_chosen)
GLM4_MOE = Family(PER_EXPERT, gate_weights=sigmoid_of_chosen)
DEEPSEEK_V3 = Family(PER_EXPERT, gate_weights=sigmoid_of_chosen, no_targets=(".kv_b_proj",), refused_targets=KV_B_PROJ)


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
