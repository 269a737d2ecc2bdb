"""Fakes, in plain torch, for the kernels of DeepSeek-V4's attention in SGLang 0.5.23, which run on a GPU only.

SGLang's own `MQALayer.forward` runs over them: which projections it calls, and what it reads of them, is real.
Written after the paper's equations, not after SGLang's kernels; only a layer without compressed keys is computed.

Belongs here: the norm of queries and keys with their rotary angles, the cache, attention with a window and sinks.
Shapes: T tokens of all prompts, H heads of D features; the last 2R of them are turned, in neighbouring pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Before a model is built: angles that its layers hold for other hardware and do not read on this way."""
    from sglang.srt.models import deepseek_v4 as model

    model.get_rope_wrapper = lambda **_: None


def attention(layer: Any, batch: Any, x_TK: Tensor) -> Tensor:
    """The output of one of SGLang's attention layers for prompts from their first token on."""
    from sglang.srt.models import deepseek_v4 as model

    assert layer.compress_ratio == 0, "compressed keys are not faked"
    cache = FakeCache()
    backend = FakeBackend(cache, layer.softmax_scale, batch.window, batch.extend_seq_lens_cpu)
    fakes = {
        "fused_q_norm_rope": norm_queries,
        "fused_rope_inplace": turn_inplace,
        "get_attn_backend": lambda: backend,
        "get_token_to_kv_pool": lambda: cache,
    }
    real = {name: getattr(model, name) for name in fakes}
    # SGLang holds it in BF16 whatever the model's dtype is; nothing is lost.
    layer.wo_a.weight.data = layer.wo_a.weight.data.to(x_TK.dtype)
    try:
        for name, fake in fakes.items():
            setattr(model, name, fake)
        y: Tensor = layer.forward(x_TK, batch.positions, batch)
        return y
    finally:
        for name, function in real.items():
            setattr(model, name, function)


class FakeCache:
    """Keys, which are the values too; of the prompts of one pass."""

    keys_TD: Tensor
    uniform_fp8 = False

    def set_swa_key_buffer_radix_fused_norm_rope(
        self, *, kv: Tensor, kv_weight: Tensor, eps: float, freqs_cis: Tensor, positions: Tensor, **_: Any
    ) -> None:
        self.keys_TD = turned(normed(kv, eps) * kv_weight, freqs_cis[positions])


@dataclass
class FakeBackend:
    cache: FakeCache
    scale: float
    window: int
    """Tokens that a query sees, itself among them."""
    lengths: list[int]

    def get_swa_out_cache_loc(self, _: Any) -> None:
        return None

    def forward(self, *, q: Tensor, attn_sink: Tensor, **_: Any) -> Tensor:
        outputs = []
        for q_THD, keys_SD in zip(q.split(self.lengths), self.cache.keys_TD.split(self.lengths), strict=True):
            scores_HTS = torch.einsum("thd,sd->hts", q_THD, keys_SD) * self.scale
            distance = torch.arange(len(q_THD))[:, None] - torch.arange(len(keys_SD))
            scores_HTS = scores_HTS.masked_fill((distance < 0) | (distance >= self.window), -torch.inf)
            sinks_HT1 = attn_sink[:, None, None].expand(-1, len(q_THD), 1)
            weights = torch.cat([scores_HTS, sinks_HT1], -1).softmax(-1)[..., :-1]
            outputs.append(torch.einsum("hts,sd->thd", weights, keys_SD))
        return torch.cat(outputs)


def norm_queries(q_THD: Tensor, out_THD: Tensor, eps: float, freqs_cis: Tensor, positions: Tensor) -> None:
    out_THD.copy_(turned(normed(q_THD, eps), freqs_cis[positions][:, None]))


def turn_inplace(q: Tensor, k: None, freqs_cis: Tensor, positions: Tensor, inverse: bool = False) -> None:
    angles = freqs_cis[positions][:, None]
    q.copy_(turned(q, angles.conj() if inverse else angles))


def normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Args: angles: `[…, R]`, complex."""
    kept, pairs = x[..., : -2 * angles.shape[-1]], x[..., -2 * angles.shape[-1] :]
    pairs = torch.view_as_complex(pairs.reshape(*pairs.shape[:-1], -1, 2).contiguous()) * angles
    return torch.cat([kept, torch.view_as_real(pairs).flatten(-2)], -1)
