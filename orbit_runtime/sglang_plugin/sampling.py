"""Top-k, top-p and min-p in SGLang: makes its log-probs those of the distribution from which it draws.

Belongs here: the hook of its sampler. Does not belong here: which tokens are removed (`algorithms.distribution`), which
settings are refused (`planner.support.sampling`).

SGLang 0.5.23 reports log-probs of the softmax before truncation, and measures top-p's mass without regard to top-k; on
a GPU it differs again with min-p (`layers/sampler.py`). It takes the logarithm of `probs` after drawing. The hook
therefore sets removed tokens to 0 before that, by the trainer's own definition, and SGLang draws from the rest as from
a whole distribution.
"""

from __future__ import annotations

from typing import Any

import torch

from orbit_runtime.algorithms.distribution import truncate


def hooks() -> list[tuple[str, Any, str]]:
    return [("sglang.srt.layers.sampler.Sampler._sample_from_probs", _draw_from_what_is_left, "AROUND")]


def _draw_from_what_is_left(
    original: Any, sampler: Any, probs: torch.Tensor, info: Any, positions: torch.Tensor, is_simple: bool
) -> Any:
    if is_simple:
        return original(sampler, probs, info, positions, True)
    whole = probs.clone() if info.need_top_k_sampling else None
    cut_off(probs, info)
    drawn = original(sampler, probs, info, positions, True)
    if whole is not None:
        # SGLang's temperature 0 is top-k 1 at temperature 1. It reports the model's own log-probs if a whole batch is
        # greedy; in a mixed batch they must be the same.
        is_greedy = (info.top_ks == 1)[:, None] & (info.temperatures.reshape(-1, 1) == 1.0)
        probs.copy_(torch.where(is_greedy, whole, probs))
    return drawn


def cut_off(probs_BV: torch.Tensor, info: Any) -> None:
    """Works in place. `info`: SGLang's `SamplingBatchInfo`, whose `top_ks` use 1 << 30 for the whole vocabulary."""
    top_k = info.top_ks.to(torch.int64)
    top_k_B1 = torch.where(top_k >= probs_BV.shape[-1], 0, top_k)[:, None] if info.need_top_k_sampling else None
    left = truncate(
        torch.log(probs_BV.float()),
        top_k_B1,
        info.top_ps[:, None].float() if info.need_top_p_sampling else None,
        info.min_ps[:, None].float() if info.need_min_p_sampling else None,
    )
    probs_BV.copy_(torch.softmax(left, dim=-1))
