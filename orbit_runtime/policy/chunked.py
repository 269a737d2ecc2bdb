"""Exact attention over packed rows in blocks of queries and keys: memory grows linearly with the tokens.

The softmax over a query's keys is assembled from blocks (online softmax: Milakov & Gimelshein, arXiv 1805.02867;
FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2). Plain torch on any device; on a CPU that has a C compiler,
`native` computes the same. A row's keys are two runs of packed tokens, its prefix and itself, so blocks are slices:
nothing is gathered, no mask is larger than a block, and the gradients of a shared prefix are summed in row order.

Belongs here: that function and its gradient. Does not belong here: the layout of rows (`packed`).

Legend: `T` packed tokens, `H` query heads, `K` key/value heads, `D` head size (that of values may differ), `Q` queries
of a block, `S` keys of a block, `G = H / K`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from orbit_runtime.policy import native
from orbit_runtime.policy.attention import AttentionSettings, fp32_product
from orbit_runtime.quant.saved_products import computed_once

BLOCK_SCORES = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Maximum scores per block over all heads: 16 and 256 MiB in fp32, with a few blocks alive at a time."""
LONGEST_BLOCK = 1024
"""Maximum queries and keys per block."""


class Run(Protocol):
    """The fields used of `policy.packed.Row`."""

    first: int
    length: int
    prefix_first: int
    prefix_length: int
    before: int
    own_first: int


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """Consecutive keys of the pack, for one block of queries."""

    keys: slice
    visible_QS: Tensor | None
    """None if every query sees every key."""


@dataclass(frozen=True, slots=True, eq=False)
class VisibleKeys:
    """Which queries see which keys, and the size of the blocks in which this is computed."""

    rows: tuple[Run, ...]
    look: AttentionSettings
    longest_block: int
    table_R7: np.ndarray | None = None
    """For the native kernel; None where torch's operations compute."""

    def blocks(self, heads: int, device: torch.device) -> Iterator[tuple[slice, list[KeyBlock]]]:
        """Every block of queries, with the blocks of keys that any of them sees, in the order of positions."""
        budget = BLOCK_SCORES["cuda" if device.type == "cuda" else "cpu"] // (heads * self.longest_block)
        step = max(1, min(self.longest_block, budget))
        for row in self.rows:
            for start in range(0, row.length, step):
                stop = min(start + step, row.length)
                yield slice(row.first + start, row.first + stop), self._keys(row, start, stop, device)

    def _keys(self, row: Run, start: int, stop: int, device: torch.device) -> list[KeyBlock]:
        """Key blocks for queries `start` to `stop` of the row. Positions count from the prefix's first token."""
        seen, window = row.prefix_length + row.before, self.look.window
        first_query, end = seen + start, seen + stop
        oldest = 0 if window is None else max(0, first_query - window + 1)
        runs = (
            (oldest, row.prefix_length, row.prefix_first),
            (max(oldest, row.prefix_length), end, row.own_first - row.prefix_length),
        )
        blocks = []
        for begin, limit, shift in runs:
            for key in range(begin, limit, self.longest_block):
                after = min(key + self.longest_block, limit)
                last_sees_first = window is None or key > end - 1 - window
                visible = None
                if not last_sees_first or after - 1 > first_query:
                    queries = torch.arange(first_query, end, device=device)[:, None]
                    keys = torch.arange(key, after, device=device)
                    visible = keys <= queries
                    if window is not None:
                        visible &= keys > queries - window
                blocks.append(KeyBlock(slice(shift + key, shift + after), visible))
        return blocks


def attend_chunked(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    rows: Sequence[Run],
    look: AttentionSettings,
    *,
    longest_block: int = LONGEST_BLOCK,
    table_R7: np.ndarray | None = None,
) -> Tensor:
    """`[T, H, D of v]` in q's dtype; scores, softmax and sums are fp32. Every query belongs to exactly one row.

    Saved for backward: queries, keys, values, the result and fp32 `[H, T]`.
    """
    result: Tensor = _Chunked.apply(q_THD, k_TKD, v_TKD, VisibleKeys(tuple(rows), look, longest_block, table_R7))
    return result


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, seen: VisibleKeys) -> Tensor:
        ctx.seen = seen
        if seen.table_R7 is not None:
            # A layer that is computed again computes this again: it takes little, and plans count it as not kept.
            lse_HT = q_THD.new_empty(q_THD.shape[1], len(q_THD), dtype=torch.float32)
            out_THD = native.attend(q_THD, k_TKD, v_TKD, seen.table_R7, seen.look, lse_HT)
        else:
            made: list[tuple[Tensor, Tensor]] = []

            def compute() -> Tensor:
                made.append(_forward(q_THD, k_TKD, v_TKD, seen))
                return made[0][0]

            out_THD = computed_once(compute)
            lse_HT = computed_once(lambda: made[0][1])
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out_THD, lse_HT)
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.seen.table_R7 is not None:
            return *native.gradients(*ctx.saved_tensors, dout_THD, ctx.seen.table_R7, ctx.seen.look), None
        return (*_backward(*ctx.saved_tensors, dout_THD, ctx.seen), None)


def _forward(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, seen: VisibleKeys) -> tuple[Tensor, Tensor]:
    """The result, and the log of each query's sum of exponentials, fp32 `[H, T]`."""
    tokens, heads, _ = q_THD.shape
    kv_heads = k_TKD.shape[1]
    out_THD = q_THD.new_empty(tokens, heads, v_TKD.shape[-1])
    lse_HT = q_THD.new_empty(heads, tokens, dtype=torch.float32)
    for queries, blocks in seen.blocks(heads, q_THD.device):
        q = _by_kv_head(q_THD[queries], kv_heads)
        size = (queries.stop - queries.start, heads)
        top, total = _start(seen.look, size, q)
        acc = q.new_zeros(*q.shape[:2], v_TKD.shape[-1], dtype=torch.float32)
        for block in blocks:
            scores = _scores(q, k_TKD[block.keys], block.visible_QS, seen.look)
            new_top = torch.maximum(top, scores.amax(-1))
            # A query that has not yet seen a key has -inf as its largest score, and nothing to rescale.
            base = new_top.masked_fill(new_top == -torch.inf, 0.0)
            weights = scores.sub_(base.unsqueeze(-1)).exp_()
            shrink = (top - base).exp_()
            total = total * shrink + weights.sum(-1)
            values = v_TKD[block.keys].transpose(0, 1)
            acc = acc.mul_(shrink.unsqueeze(-1)).add_(fp32_product(weights.to(values.dtype), values))
            top = new_top
        out_THD[queries] = _by_token(acc / total.unsqueeze(-1), *size).to(out_THD.dtype)
        lse_HT[:, queries] = (top + total.log()).view(heads, -1)
    return out_THD, lse_HT


def _backward(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    dout_THD: Tensor,
    seen: VisibleKeys,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads = q_THD.shape[1], k_TKD.shape[1]
    dq_THD = torch.empty_like(q_THD)
    dk_KTD, dv_KTD = (x.new_zeros(kv_heads, len(x), x.shape[-1], dtype=torch.float32) for x in (k_TKD, v_TKD))
    for queries, blocks in seen.blocks(heads, q_THD.device):
        q, dout = (_by_kv_head(x[queries], kv_heads) for x in (q_THD, dout_THD))
        lse = lse_HT[:, queries].reshape(kv_heads, -1, 1)
        # Softmax gradient: each query's sum(p * dp) follows from the result.
        delta = (dout.float() * _by_kv_head(out_THD[queries], kv_heads).float()).sum(-1, keepdim=True)
        dq = q.new_zeros(q.shape, dtype=torch.float32)
        for block in blocks:
            keys, values = (x[block.keys].transpose(0, 1) for x in (k_TKD, v_TKD))
            scores = _scores(q, k_TKD[block.keys], block.visible_QS, seen.look)
            # Derivative of the cap; 0 for keys that a query does not see.
            slope = 1.0 if seen.look.cap is None else (1 - (scores / seen.look.cap).square()).clamp_(min=0)
            weights = scores.sub_(lse).exp_()
            dweights = fp32_product(dout, values.transpose(1, 2))
            dv_KTD[:, block.keys] += fp32_product(weights.to(dout.dtype).transpose(1, 2), dout)
            dscores = dweights.sub_(delta).mul_(weights).mul_(seen.look.scale * slope).to(q.dtype)
            dq += fp32_product(dscores, keys)
            dk_KTD[:, block.keys] += fp32_product(dscores.transpose(1, 2), q)
        dq_THD[queries] = _by_token(dq, queries.stop - queries.start, heads).to(dq_THD.dtype)
    dk_TKD, dv_TKD = dk_KTD.transpose(0, 1).to(k_TKD.dtype), dv_KTD.transpose(0, 1).to(v_TKD.dtype)
    return dq_THD, dk_TKD, dv_TKD


def _start(look: AttentionSettings, size: tuple[int, int], q: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 `[K, G·Q]`: the initial maximum score and sum of exponentials, of no scores or of the sinks alone."""
    queries, _ = size
    if look.sinks_H is None:
        return q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32), q.new_zeros(q.shape[:2], dtype=torch.float32)
    sinks = look.sinks_H.float().unsqueeze(-1).expand(-1, queries).reshape(q.shape[:2])
    return sinks, torch.ones_like(sinks)


def _scores(q: Tensor, k_SKD: Tensor, visible_QS: Tensor | None, look: AttentionSettings) -> Tensor:
    """fp32 `[K, G·Q, S]`, -inf if the query does not see the key."""
    scores = look.capped(fp32_product(q, k_SKD.permute(1, 2, 0)).mul_(look.scale))
    if visible_QS is None:
        return scores
    blocks = scores.view(scores.shape[0], -1, *visible_QS.shape)
    return blocks.masked_fill_(~visible_QS, -torch.inf).view_as(scores)


def _by_kv_head(x_QHD: Tensor, kv_heads: int) -> Tensor:
    """`[K, G·Q, D]`: query heads grouped under the key/value head that they read."""
    return x_QHD.transpose(0, 1).reshape(kv_heads, -1, x_QHD.shape[-1])


def _by_token(x: Tensor, queries: int, heads: int) -> Tensor:
    """`[K, G·Q, D]` → `[Q, H, D]`."""
    return x.view(heads, queries, -1).transpose(0, 1)
