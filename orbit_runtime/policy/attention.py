"""One door into transformers' attention: every layer hands its queries, keys and values to a `Plan`.

Belongs here: the registered attention function and the attention kernels both plans share.
Does not belong here: which token may see which (`packed` for whole sequences, `rollout` for cached decoding).

Legend: `B` rows, `H` query heads, `K` key/value heads, `Q` query positions, `S` key positions, `T` packed tokens,
`D` head size.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from orbit_runtime.errors import UnsupportedError

IMPLEMENTATION = "orbit"
Kernel = Literal["Eager", "SDPA"]


class Plan(Protocol):
    """Decides which keys each query sees. One plan serves one forward pass over all layers."""

    layout: tuple[int, int]
    """How the pass's tokens stand for the model's modules: `(1, -1)` all in one row, `(-1, 1)` each in a row."""

    def attend(
        self, layer: int, q_1HTD: torch.Tensor, k_1KTD: torch.Tensor, v_1KTD: torch.Tensor, *, scale: float
    ) -> torch.Tensor:
        """Returns `[1, T, H, D]`; with a token in each row, `[T, 1, H, D]` from `[T, H, 1, D]`."""
        ...

    def attend_tokens(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, *, scale: float
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
        UnsupportedError: the layer asks for something a plan does not do (sinks, soft capping).
    """
    for unknown in ("s_aux", "softcap", "position_bias"):
        if extras.get(unknown) is not None:
            raise UnsupportedError(f"attention with {unknown} is not supported", where=type(module).__name__)
    plan: Plan = extras["orbit_plan"]
    _check_window(plan.longest, extras.get("sliding_window"))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return plan.attend(module.layer_idx, query, key, value, scale=scale), None  # type: ignore[arg-type]


def _check_window(longest: int, window: int | None) -> None:
    """Plans show every query its whole past, so a sliding window that would hide some of it is refused."""
    if window is not None and longest > window:
        raise UnsupportedError(
            f"a sequence of {longest} tokens exceeds the model's sliding window of {window}",
            where="spec.model.maxSequenceLength",
            fix=f"set spec.model.maxSequenceLength to {window} or less",
        )


def attend_rows(
    q_BHQD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    *,
    visible_B1QS: torch.Tensor | None,
    scale: float,
    kernel: Kernel,
) -> torch.Tensor:
    """Softmax attention of padded rows, grouped-query heads included. `visible` is True where a query sees a key.

    Every query must see at least one key, or its output is undefined.
    """
    if kernel == "SDPA":
        gqa = q_BHQD.shape[1] != k_BKSD.shape[1]
        return F.scaled_dot_product_attention(
            q_BHQD, k_BKSD, v_BKSD, attn_mask=visible_B1QS, scale=scale, enable_gqa=gqa
        )
    rows, heads, queries, _ = q_BHQD.shape
    kv_heads = k_BKSD.shape[1]
    grouped = q_BHQD.reshape(rows, kv_heads, heads // kv_heads * queries, -1)
    scores = torch.matmul(grouped, k_BKSD.transpose(-1, -2)).mul_(scale)
    if visible_B1QS is not None:
        scores = scores.view(rows, heads, queries, -1).masked_fill_(~visible_B1QS, float("-inf")).view_as(scores)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v_BKSD.dtype)
    return torch.matmul(weights, v_BKSD).view(rows, heads, queries, -1)


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, orbit_attention)
