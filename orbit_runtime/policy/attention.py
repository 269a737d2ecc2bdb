"""One door into transformers' attention: every layer hands its queries, keys and values to a `Plan`.

Belongs here: the registered attention function and the attention kernels both plans share.
Does not belong here: which token may see which (`packed` for whole sequences, `rollout` for cached decoding).

Legend: `B` rows, `H` query heads, `K` key/value heads, `Q` query positions, `S` key positions, `T` packed tokens,
`D` head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from orbit_runtime.errors import UnsupportedError

IMPLEMENTATION = "orbit"
Kernel = Literal["Eager", "SDPA", "Chunked"]
"""Of packed passes; cached decoding knows no chunks and takes `SDPA` for them."""
Visible = torch.Tensor | Literal["causal"] | None
"""bool `[B, 1, Q, S]`, True where a query sees a key; `causal`: each sees the keys up to its own place; None: all."""


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """How a layer looks at its keys."""

    scale: float
    """What the scores are multiplied by."""
    window: int | None = None
    """A query sees this many newest positions, its own among them; None: all."""
    sinks_H: torch.Tensor | None = None
    """A score per head that takes its share of the softmax and has no value (gpt-oss)."""


class Plan(Protocol):
    """Decides which keys each query sees. One plan serves one forward pass over all layers."""

    layout: tuple[int, int]
    """How the pass's tokens stand for the model's modules: `(1, -1)` all in one row, `(-1, 1)` each in a row."""

    def attend(
        self, layer: int, q_1HTD: torch.Tensor, k_1KTD: torch.Tensor, v_1KTD: torch.Tensor, look: Look
    ) -> torch.Tensor:
        """Returns `[1, T, H, D]`; with a token in each row, `[T, 1, H, D]` from `[T, H, 1, D]`."""
        ...

    def attend_tokens(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, look: Look
    ) -> torch.Tensor:
        """The same with tokens first: returns `[T, H·D]`."""
        ...

    @property
    def longest(self) -> int:
        """Positions of the longest sequence in this pass."""
        ...


def orbit_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface; the plan travels in the keyword `orbit_plan`.

    Raises:
        UnsupportedError: the layer asks for something a plan does not do (soft capping).
    """
    for unknown in ("softcap", "position_bias"):
        if extras.get(unknown) is not None:
            raise UnsupportedError(f"attention with {unknown} is not supported", where=type(module).__name__)
    plan: Plan = extras["orbit_plan"]
    window = extras.get("sliding_window")
    look = Look(
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        window if window is not None and plan.longest > window else None,
        extras.get("s_aux"),
    )
    return plan.attend(module.layer_idx, query, key, value, look), None  # type: ignore[arg-type]


def attend_rows(
    q_BHQD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    *,
    visible_B1QS: Visible,
    look: Look,
    kernel: Kernel,
) -> torch.Tensor:
    """Softmax attention of padded rows, grouped-query heads included.

    Every query must see at least one key, or its output is undefined. With sinks the explicit products are taken:
    torch's fused kernel has none. The window is in `visible`.
    """
    causal = isinstance(visible_B1QS, str)
    mask = None if isinstance(visible_B1QS, str) else visible_B1QS
    if kernel != "Eager" and look.sinks_H is None:
        gqa = q_BHQD.shape[1] != k_BKSD.shape[1]
        return F.scaled_dot_product_attention(
            q_BHQD, k_BKSD, v_BKSD, attn_mask=mask, is_causal=causal, scale=look.scale, enable_gqa=gqa
        )
    assert not causal, "the explicit products are given a mask"
    rows, heads, queries, _ = q_BHQD.shape
    kv_heads = k_BKSD.shape[1]
    grouped = q_BHQD.reshape(rows, kv_heads, heads // kv_heads * queries, -1)
    scores = torch.matmul(grouped, k_BKSD.transpose(-1, -2)).mul_(look.scale)
    if mask is not None:
        scores = scores.view(rows, heads, queries, -1).masked_fill_(~mask, float("-inf")).view_as(scores)
    if look.sinks_H is not None:
        sinks = look.sinks_H.to(scores.dtype).view(1, heads, 1).expand(rows, -1, queries)
        weights = softmax_with_sinks(scores, sinks.reshape(*scores.shape[:-1]))
    else:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    return torch.matmul(weights.to(v_BKSD.dtype), v_BKSD).view(rows, heads, queries, -1)


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """fp32 softmax over the last dimension and one more score each, whose share is dropped."""
    return torch.softmax(torch.cat((scores, sinks.unsqueeze(-1)), -1), dim=-1, dtype=torch.float32)[..., :-1]


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, orbit_attention)
