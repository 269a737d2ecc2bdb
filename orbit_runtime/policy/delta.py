"""The gated delta rule of packed sequences (Qwen3-Next, Qwen3.5), in place of transformers', which takes padded rows.

Chunks of all sequences are solved in one batch; then as many steps as the longest sequence has chunks carry the states
on. A completion begins with the state after its prompt, so that a shared prompt is computed once.

Belongs here: the rule, the short convolution before it, and where packed tokens stand in both. Does not belong here:
projections, gates and norms, which are transformers' own, and so is the rule of cached rows.

Legend: `T` packed tokens, `M` chunks, `C` positions of a chunk, `H` heads, `D` head size, `W` positions that the
convolution reads, `N` channels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import ACT2FN

from orbit_runtime.policy.attention import decoder_of
from orbit_runtime.policy.packed import PackedPlan, Row, gather_rows, to_device
from orbit_runtime.quant.expert_linear import with_zero_row

CHUNK = (16, 64)
"""Fewest and most positions of a chunk. Between them it has as many as a head's size: with more, products within chunks
outweigh those with states; with fewer, more states are kept for the backward pass."""
EPSILON = 1e-6
"""Added to the squared length of queries and keys, as in transformers."""


class _Moved(torch.autograd.Function):
    """Rows in another order. An index past the last row gives zeros; every row is in the result at most once, and its
    place there is the inverse, with which the backward pass reads instead of adding up."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return with_zero_row(rows).index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return with_zero_row(grad).index_select(0, *ctx.saved_tensors), None, None


@dataclass(eq=False)
class Chunks:
    """The chunks of a packed pass: those that are the n-th of their sequence, prompt included, follow those before."""

    token_MC: Tensor
    """Packed index of each position; the number of tokens where there is none."""
    place_T: Tensor
    """Index of each token among the chunks' positions."""
    before: list[Tensor | None]
    """For each step, index of the chunk before each of its chunks among those of the step before."""
    counts: list[int]
    """Number of chunks of each step."""

    def of_heads(self, heads: int) -> tuple[Tensor, Tensor]:
        """Indices between `[T·H]` and `[M·H·C]`: of the former's rows in the order of the latter, and the inverse."""
        head_H = torch.arange(heads, device=self.place_T.device)
        chunk = self.token_MC.shape[1]
        token_MHC = (self.token_MC[:, None] * heads + head_H[:, None]).clamp(max=len(self.place_T) * heads)
        place_TH = (self.place_T // chunk * heads)[:, None] + head_H
        return token_MHC.flatten(), (place_TH * chunk + (self.place_T % chunk)[:, None]).flatten()


def build_chunks(rows: Sequence[Row], device: torch.device, size: int) -> Chunks:
    counts = {row.first: -(-row.length // size) for row in rows}
    starts = {row.first: counts[row.prefix_first] if row.prefix_length else 0 for row in rows}
    steps = max(starts[row.first] + counts[row.first] for row in rows)
    tokens = sum(row.length for row in rows)
    chunks: list[list[tuple[int, int]]] = [[] for _ in range(steps)]
    places: list[dict[int, int]] = [{} for _ in range(steps)]
    before: list[list[int]] = [[] for _ in range(steps)]
    for row in rows:
        for number in range(counts[row.first]):
            step = starts[row.first] + number
            if step:
                before[step].append(places[step - 1][row.first if number else row.prefix_first])
            places[step][row.first] = len(chunks[step])
            chunks[step].append((row.first + number * size, row.first + row.length))
    first_M, end_M = np.array([each for step in chunks for each in step], np.int64).T
    token_MC = first_M[:, None] + np.arange(size)
    token_MC = np.where(token_MC < end_M[:, None], token_MC, tokens)
    place_T = np.empty(tokens + 1, np.int64)
    place_T[token_MC.ravel()] = np.arange(token_MC.size)
    indices = [to_device(each, device) if each else None for each in before]
    return Chunks(to_device(token_MC, device), to_device(place_T[:-1], device), indices, [len(each) for each in chunks])


def delta_rule(
    query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, decay_TH: Tensor, beta_TH: Tensor, chunks: Chunks
) -> Tensor:
    """fp32 `[T, H, D of values]`. The state of a head, `[D of keys, D of values]`, is multiplied by `exp(decay)` at a
    token, then moved by `beta` towards giving the token's value for its key; the query reads it after that.

    Yang et al., arXiv 2412.06464, section 3.3; queries and keys are scaled to length 1.
    """
    tokens, heads, _ = value_THD.shape
    order, places = chunks.of_heads(heads)
    chunk = chunks.token_MC.shape[1]

    def moved(x: Tensor) -> Tensor:
        return _Moved.apply(x.reshape(tokens * heads, -1), order, places).view(-1, heads, chunk, x[0, 0].numel())  # type: ignore[no-any-return,no-untyped-call]

    def unit(x_THD: Tensor) -> Tensor:
        return x_THD * torch.rsqrt((x_THD * x_THD).sum(-1, keepdim=True) + EPSILON)

    query, key, value = moved(unit(query_THD.float())), moved(unit(key_THD.float())), moved(value_THD.float())
    gates = moved(torch.stack((decay_TH.float(), beta_TH.float()), -1))
    total, beta = gates[..., :1].cumsum(-2), gates[..., 1:]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=total.device).triu_(1)
    # Of each position, relative to an earlier one.
    decay = (total - total.transpose(-1, -2)).masked_fill(later, -torch.inf).exp()
    grown = total.exp()
    query = query * query.shape[-1] ** -0.5
    key_beta, keys = key * beta, key.transpose(-1, -2)
    sides = torch.cat((value * beta, key_beta * grown), -1)
    solved = torch.linalg.solve_triangular(key_beta @ keys * decay, sides, upper=False, unitriangular=True)
    values, read = solved.split((value.shape[-1], key.shape[-1]), -1)
    out = _carried(
        chunks,
        (
            values,
            read,
            query * grown,
            query @ keys * decay,
            key * (total[..., -1:, :] - total).exp(),
            grown[..., -1:, :],
        ),
    )
    return _Moved.apply(out.flatten(0, 2), places, order).view(tokens, heads, -1)  # type: ignore[no-any-return,no-untyped-call]


def _carried(chunks: Chunks, parts: tuple[Tensor, ...]) -> Tensor:
    """`[M, H, C, D]` of all chunks, step by step.

    Args:
        parts: of every chunk: values if its state were 0, what the state adds to each, queries, the queries' shares in
            the chunk's values, keys, and how the state shrinks.
    """
    outs: list[Tensor] = []
    state = None
    last = len(chunks.counts) - 1
    steps = zip(*(each.split(chunks.counts) for each in parts), strict=True)
    for number, (values, read, query, shares, key, shrink) in enumerate(steps):
        before = chunks.before[number]
        if before is None or state is None:
            outs.append(shares @ values)
            state = key.transpose(-1, -2) @ values
            continue
        state = gather_rows(state.flatten(1), before).view(-1, *state.shape[1:])
        values = values - read @ state
        outs.append(query @ state + shares @ values)
        if number < last:
            state = state * shrink + key.transpose(-1, -2) @ values
    return torch.cat(outs)


def build_before(rows: Sequence[Row], device: torch.device, width: int) -> list[Tensor]:
    """Packed indices `[T]` of the token before each in its sequence, of that before it, and so on, `width - 1` times;
    the number of tokens where there is none."""
    tokens = sum(row.length for row in rows)
    before = np.arange(-1, tokens - 1)
    before[[row.first for row in rows]] = [
        row.prefix_first + row.prefix_length - 1 if row.prefix_length else tokens for row in rows
    ]
    before = np.append(before, tokens)
    found = [before]
    while len(found) < width - 1:
        found.append(before[found[-1]])
    return [to_device(each[:-1], device) for each in found]


def pack_delta_rule(model: nn.Module) -> bool:
    """Makes transformers' code of this model take packed sequences, if it has the rule; whether it has."""
    code = sys.modules[type(decoder_of(model)).__module__]
    packed: dict[str, Callable[..., Any]] = {"causal_conv1d_fn": _convolve, "torch_chunk_gated_delta_rule": _apply_rule}
    if not all(hasattr(code, name) for name in packed):
        return False
    for name, function in packed.items():
        own = getattr(code, name)
        if getattr(own, "func", None) is not function:
            setattr(code, name, partial(function, own))
    return True


def _convolve(
    own: Callable[..., Tensor],
    x_1NT: Tensor,
    weight_NW: Tensor,
    bias_N: Tensor | None = None,
    activation: str | None = None,
    *,
    orbit_plan: PackedPlan | None = None,
    **named: Any,
) -> Tensor:
    """transformers' `causal_conv1d_fn`; `own` is the one that takes rows."""
    if orbit_plan is None:
        return own(x_1NT, weight_NW, bias_N, activation=activation, **named)
    width, rows = weight_NW.shape[-1], orbit_plan.batch.rows
    padded = with_zero_row(x_1NT[0].T)
    out_TN = padded[:-1] * weight_NW[:, -1].float() + (0.0 if bias_N is None else bias_N)
    before = orbit_plan.once(("before", width), lambda: build_before(rows, padded.device, width))
    for distance, index_T in enumerate(before, 2):
        out_TN = out_TN + gather_rows(padded, index_T) * weight_NW[:, -distance].float()
    out_TN = out_TN if activation is None else ACT2FN[activation](out_TN)
    return out_TN.to(x_1NT.dtype).T[None]


def _apply_rule(
    own: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    orbit_plan: PackedPlan | None = None,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' `chunk_gated_delta_rule`; `own` is the one that takes rows."""
    if orbit_plan is None:
        return own(query, key, value, **named)  # type: ignore[no-any-return]
    size = min(max(query.shape[-1], CHUNK[0]), CHUNK[1])
    chunks = orbit_plan.once(("chunks", size), lambda: build_chunks(orbit_plan.batch.rows, query.device, size))
    out_THD = delta_rule(query[0], key[0], value[0], named["g"][0], named["beta"][0], chunks)
    return out_THD.to(query.dtype)[None], None
