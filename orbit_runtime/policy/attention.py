"""The single entry point to transformers' attention: every layer passes queries, keys and values to an `AttentionPlan`.

Legend: `B` rows, `H` query heads, `K` key/value heads, `Q` query positions, `S` key positions, `T` packed tokens,
`D` head size.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from orbit_runtime.errors import UnsupportedError

IMPLEMENTATION = "orbit"
NO_TOWER = "the vision tower is not loaded: images are not supported"
BESIDE_CACHE = "orbit_beside_cache"
"""The same in packed passes, and torch's fused kernel where a pass reads the model's own cache."""
Kernel = Literal["Eager", "SDPA", "Chunked"]
"""Kernel of packed passes; cached decoding has no chunks and uses `SDPA` instead."""
Visible = torch.Tensor | Literal["causal"] | None
"""bool `[B, 1, Q, S]`, True if a query sees a key; `causal`: keys up to the query's own position; None: all keys."""


Rows = Literal["packed", "padded", "single"]
"""How sequences are laid out: many in one row, a padded row each, or a pass each."""
Decode = Literal["pages", "cache", "whole"]
"""What a decode step reads: Orbit's pages of keys and values, the model's own cache, or the whole sequence again."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How the passes of a model run, and what its logits are."""

    rows: Rows = "packed"
    decode: Decode = "pages"
    attention: str = IMPLEMENTATION
    """transformers' name of the attention; Orbit's own unless sequences have rows of their own."""
    scale: float = 1.0
    """Factor of the output layer's results."""
    cap: float | None = None
    """Logits are `cap * tanh(logits / cap)`; None: not capped."""
    uncalled: tuple[str, ...] = ()
    """Last names of linears whose weight is read by code that does not call them."""
    why: str = ""
    """What a probe found that makes packing, or pages, wrong for the model; empty if it has both."""
    has_tower: bool = False
    """Whether the model is published with a vision tower, which is left out."""

    @property
    def said(self) -> str:
        """A line for people, before anything runs: what of the model is left out, and how its passes run; empty where
        there is nothing to say."""
        return "; ".join(each for each in (NO_TOWER * self.has_tower, self.text) if each)

    @property
    def text(self) -> str:
        """A line for people; empty for models that are packed and read pages, and for families whose row says it."""
        if not self.why:
            return ""
        words = {
            "packed": "are packed", "padded": "have a padded row each", "single": "have a pass each",
            "cache": "the model's own cache", "whole": "passes over the whole sequence",
        }  # fmt: skip
        return f"sequences {words[self.rows]}, and tokens are sampled from {words[self.decode]}: {self.why}"

    def shaped(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """The model's logits, from its output layer's results; fp32 where they are not the same."""
        if self.scale != 1.0:
            logits_RV = logits_RV.float() * self.scale
        return logits_RV if self.cap is None else self.cap * torch.tanh(logits_RV.float() / self.cap)


PACKED = Mode()


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSettings:
    """How a layer attends to its keys."""

    scale: float
    """Factor applied to the scores."""
    window: int | None = None
    """Number of newest positions that a query sees, its own included; None for all."""
    sinks_H: torch.Tensor | None = None
    """One score per head that takes part in the softmax but has no value (gpt-oss)."""
    cap: float | None = None
    """Scores are `cap * tanh(scores / cap)` (Gemma 2); None: not capped."""

    @property
    def is_plain(self) -> bool:
        """Whether torch's fused kernel supports it."""
        return self.sinks_H is None and self.cap is None

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.cap is None else torch.tanh(scores / self.cap) * self.cap


class AttentionPlan(Protocol):
    """Decides which keys each query sees. One plan serves one forward pass over all layers."""

    layout: tuple[int, int]
    """How the modules see the pass's tokens: `(1, -1)` all in one row, `(-1, 1)` one per row."""

    def attend(
        self, layer: int, q_1HTD: torch.Tensor, k_1KTD: torch.Tensor, v_1KTD: torch.Tensor, look: AttentionSettings
    ) -> torch.Tensor:
        """Returns `[1, T, H, D]`; with one token per row, `[T, 1, H, D]` from `[T, H, 1, D]`."""

    def attend_tokens(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, look: AttentionSettings
    ) -> torch.Tensor:
        """The same with the token axis first: returns `[T, H·D]`."""

    @property
    def longest(self) -> int:
        """Length of the longest sequence in this pass."""


def orbit_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface; the plan is passed as the keyword `orbit_plan`.

    Raises:
        UnsupportedError: the layer has a bias by position, which no plan supports, or hands no plan on.
    """
    if extras.get("position_bias") is not None:
        raise UnsupportedError("attention with position_bias is not supported", where=type(module).__name__)
    plan: AttentionPlan | None = extras.get("orbit_plan")
    if plan is None:
        raise UnsupportedError(
            "its layers do not hand arguments of a pass to the attention", where=type(module).__name__
        )
    window = extras.get("sliding_window")
    look = AttentionSettings(
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        window if window is not None and plan.longest > window else None,
        extras.get("s_aux"),
        extras.get("softcap"),
    )
    return plan.attend(module.layer_idx, query, key, value, look), None  # type: ignore[arg-type]


def _orbit_or_torch(module: Any, query: Any, key: Any, value: Any, mask: Any, **extras: Any) -> tuple[Any, Any]:
    chosen = _torch_attention if extras.get("orbit_plan") is None else orbit_attention
    return chosen(module, query, key, value, mask, **extras)


def _torch_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **extras: Any) -> tuple[Any, Any]:
    out, weights = sdpa_attention_forward(module, query, key, _as_wide(value, query), mask, **extras)
    return out[..., : value.shape[-1]], weights


def _as_wide(value: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Values with zeros behind them: torch's fused kernel for CPUs takes no values of another size than the queries."""
    missing = query.shape[-1] - value.shape[-1]
    return F.pad(value, (0, missing)) if missing > 0 and not value.is_cuda else value


def decoder_of(model: torch.nn.Module) -> Any:
    """The language model without its output layer."""
    found: Any = getattr(model, str(model.base_model_prefix), None)
    found = model.model if found is None else found
    return getattr(found, "language_model", found)


def layers_of(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The decoder's layers, whatever they are called."""
    decoder = decoder_of(model)
    found: Any = getattr(decoder, "layers", None)
    if found is None:
        count = getattr(model.config.get_text_config(), "num_hidden_layers", 0)  # type: ignore[union-attr,operator]
        lists = (each for each in decoder.modules() if isinstance(each, torch.nn.ModuleList))
        found = next((each for each in lists if len(each) == count), None)
    if found is None:
        raise ValueError(f"{type(decoder).__name__} has no list of decoder layers")
    return found  # type: ignore[no-any-return]


def run_decoder(
    model: torch.nn.Module, token_BS: torch.Tensor, position_BS: torch.Tensor, *, use_cache: bool = False, **given: Any
) -> torch.Tensor:
    """Last hidden states `[B, S, N]` of a pass with transformers' own attention, after the final norm."""
    decoder = decoder_of(model)
    named = inspect.signature(decoder.forward).parameters
    if "position_ids" in named:
        given["position_ids"] = position_BS
    if "cache_params" in named and "past_key_values" in given:
        given["cache_params"] = given.pop("past_key_values")
    return decoder(input_ids=token_BS, use_cache=use_cache, **given).last_hidden_state  # type: ignore[no-any-return]


def hidden_of(
    model: torch.nn.Module, token_ids_BQ: torch.Tensor, position_BQ: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    """Last hidden states `[B, Q, N]` of a pass with this plan, after the final norm."""
    decoder = decoder_of(model)
    given: dict[str, Any] = {"orbit_plan": plan}
    if decoder.config._attn_implementation == BESIDE_CACHE:
        given["attention_mask"] = defaultdict[str, None](lambda: None)  # for every kind of layer; the plan has it
    out = decoder(input_ids=token_ids_BQ, position_ids=position_BQ, use_cache=False, **given)
    return out.last_hidden_state  # type: ignore[no-any-return]


def attend_rows(
    q_BHQD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    *,
    visible_B1QS: Visible,
    look: AttentionSettings,
    kernel: Kernel,
) -> torch.Tensor:
    """Softmax attention over padded rows, including grouped-query heads.

    Every query must see at least one key, otherwise its output is undefined. Sinks and caps use explicit products,
    because torch's fused kernel does not support them. The window is already part of `visible`.
    """
    causal = isinstance(visible_B1QS, str)
    mask = None if isinstance(visible_B1QS, str) else visible_B1QS
    is_fused, sharing = kernel != "Eager" and look.is_plain, q_BHQD.shape[1] // k_BKSD.shape[1]
    if is_fused:
        attended = F.scaled_dot_product_attention(
            q_BHQD, k_BKSD, _as_wide(v_BKSD, q_BHQD), attn_mask=mask, is_causal=causal, scale=look.scale,
            enable_gqa=sharing > 1,
        )  # fmt: skip
        return attended[..., : v_BKSD.shape[-1]]
    assert not causal, "the explicit products are given a mask"
    rows, heads, queries, _ = q_BHQD.shape
    grouped = q_BHQD.reshape(rows, k_BKSD.shape[1], sharing * queries, -1)
    scores = look.capped(torch.matmul(grouped, k_BKSD.transpose(-1, -2)).mul_(look.scale))
    if mask is not None:
        scores = scores.view(rows, heads, queries, -1).masked_fill_(~mask, float("-inf")).view_as(scores)
    if look.sinks_H is not None:
        sinks = look.sinks_H.to(scores.dtype).view(1, heads, 1).expand(rows, -1, queries)
        weights = softmax_with_sinks(scores, sinks.reshape(*scores.shape[:-1]))
    else:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    return torch.matmul(weights.to(v_BKSD.dtype), v_BKSD).view(rows, heads, queries, -1)


def fp32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Batched product with an fp32 result."""
    if a.dtype is torch.float32:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """fp32 softmax over the last dimension plus one extra score each, whose share is dropped."""
    return torch.softmax(torch.cat((scores, sinks.unsqueeze(-1)), -1), dim=-1, dtype=torch.float32)[..., :-1]


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, orbit_attention)
ALL_ATTENTION_FUNCTIONS.register("sdpa", _torch_attention)  # some types ask for this name
ALL_ATTENTION_FUNCTIONS.register(BESIDE_CACHE, _orbit_or_torch)
ALL_MASK_ATTENTION_FUNCTIONS.register(BESIDE_CACHE, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
