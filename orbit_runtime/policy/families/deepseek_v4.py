"""DeepSeek-V4: the checkpoint's own names, a grouped output projection, and sequences that cannot be packed.

Its compressors turn runs of neighbouring tokens into entries of their own, so a sequence must occupy a row of its own
from its first token on (`policy.whole_rows`). Attention, hyper-connections and routers are transformers' own modules.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from orbit_runtime.policy.attention import Mode
from orbit_runtime.policy.families.family import Family
from orbit_runtime.policy.families.mixture import PER_EXPERT
from orbit_runtime.quant.linear import FrozenLinear
from orbit_runtime.quant.saved_products import computed_once

RENAMES = (
    (r"^model\.", ""),
    (r"^embed_tokens\b", "embed"),
    (r"^lm_head\b", "head"),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.compressor\.indexer\.scorer\.weights_proj\b", ".attn.indexer.weights_proj"),
    (r"\.self_attn\.compressor\.indexer\.q_b_proj\b", ".attn.indexer.wq_b"),
    (r"\.self_attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
    (r"\.self_attn\.", ".attn."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.compressor\.gate_proj\b", ".compressor.wgate"),
    (r"\.position_bias$", ".ape"),
    (r"\.kv_proj\b", ".wkv"),
    (r"\.(q|o)_(a|b)_proj\b", r".w\1_\2"),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.mlp\.", ".ffn."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"\.gate_proj\b", ".w1"),
    (r"\.up_proj\b", ".w3"),
    (r"\.down_proj\b", ".w2"),
)
"""transformers' name → the checkpoint's name, applied in this order."""


def checkpoint_name(name: str) -> str:
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _multiply(x_TGK: Tensor, dense: Tensor) -> Tensor:
    return torch.einsum("tgk,gnk->tgn", x_TGK, dense.unflatten(0, (x_TGK.shape[1], -1)))


class _BlockDiagonal(torch.autograd.Function):
    """Saves only the packed tensors."""

    @staticmethod
    def forward(ctx: Any, x_TGK: Tensor, linear: FrozenLinear, *packed: Tensor) -> Tensor:
        ctx.save_for_backward(*packed)
        ctx.settings = (linear.dense, x_TGK.shape[1])
        return computed_once(lambda: _multiply(x_TGK, linear.dense(packed, x_TGK.dtype)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TGN: Tensor) -> tuple[Tensor | None, ...]:
        packed = ctx.saved_tensors
        dense, groups = ctx.settings
        dx = torch.einsum("tgn,gnk->tgk", dy_TGN, dense(packed, dy_TGN.dtype).unflatten(0, (groups, -1)))
        return dx, None, *(None for _ in packed)


class FrozenGroupedLinear(nn.Module):
    """`o_a_proj`: each group of heads times its own rows of one packed weight, small enough to be dequantised whole.

    Shapes: x `[..., G, K]`, weight `[G·N, K]`, result `[..., G, N]`.
    """

    def __init__(self, linear: FrozenLinear, module: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.num_groups = int(module.n_groups)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        x_TGK = x.reshape(-1, self.num_groups, x.shape[-1])
        y_TGN: Tensor = _BlockDiagonal.apply(x_TGK, self.linear, *self.linear.views())
        return y_TGN.view(*x.shape[:-2], self.num_groups, -1)


DEEPSEEK_V4 = Family(
    PER_EXPERT,
    checkpoint_name=checkpoint_name,
    left_out=(r"mtp\.",),
    no_targets=(".compressor.", ".o_a_proj"),
    refused_targets={"o_a_proj": "its groups are a matrix of blocks, which no engine serves an adapter for"},
    special_linears={"DeepseekV4GroupedLinear": FrozenGroupedLinear},
    kept_fp32=("attn_hc.", "ffn_hc.", "hc_head.", ".sinks", ".position_bias"),
    mode=Mode("padded", "whole", "eager"),
)
