"""Qwen3-MoE, GLM-4.5 and DeepSeek-V3: separate gate, up and down tensors for each expert, `act(gate) * up`.

Routers, shared experts and attention are transformers' own modules over frozen linears. The routers of DeepSeek-V3 and
GLM-4.5 add their correction bias to the sigmoid scores only to choose experts, not to weigh them.
"""

from __future__ import annotations

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
