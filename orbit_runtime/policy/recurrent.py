"""Mixers with a state, over packed sequences, in place of transformers', which take padded rows: the gated delta rule
(Qwen3-Next, Qwen3.5), the state space of Mamba 2 (Falcon-H1, Granite 4.0, Nemotron-H) and the convolution before both.

Chunks of all sequences are computed in one batch; then as many steps as the longest sequence has chunks carry the
states on. A completion begins with the state after its prompt, so that a shared prompt is computed once.

Belongs here: the rules, the convolution, and where packed tokens stand in both. Does not belong here:
projections, gates and norms, which are transformers' own, and so are the rules of cached rows.

Legend: `T` packed tokens, `M` chunks, `C` positions of a chunk, `H` heads, `D` head size, `G` groups of heads, `R`
heads of a group, `S` size of a key, `L` positions of the convolution, `N` channels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.activations import ACT2FN

from orbit_runtime.policy.attention import decoder_of
from orbit_runtime.policy.packed import PackedPlan, Row, gather_rows, to_device
from orbit_runtime.quant.expert_linear import with_zero_row

CHUNK = (16, 64)
"""Fewest and most positions of a chunk. Between them it has half as many as a key has numbers: with more, products
within chunks outweigh those with states; with fewer, more states are kept for the backward pass."""
EPSILON = 1e-6
"""Added to the squared length of queries and keys, as in transformers."""


class _Moved(torch.autograd.Function):
    """Rows in another order. An index past the last row gives zeros; every row is in the result at most once, and its
    place there is the inverse, with which the backward pass reads instead of adding up."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _read(rows, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _read(grad, *ctx.saved_tensors), None, None


def _read(rows: Tensor, index: Tensor) -> Tensor:
    return (rows if len(index) <= len(rows) else with_zero_row(rows)).index_select(0, index)


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
    _orders: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def take(self, x_THD: Tensor) -> Tensor:
        """`[M, H, C, D]`; zeros where there is no token."""
        tokens, heads, size = x_THD.shape
        order, places = self._of_heads(heads)
        rows = _Moved.apply(x_THD.reshape(tokens * heads, size), order, places)  # type: ignore[no-untyped-call]
        return rows.view(-1, heads, self.token_MC.shape[1], size)  # type: ignore[no-any-return]

    def put_back(self, x_MHCD: Tensor) -> Tensor:
        """`[T, H, D]`."""
        heads, size = x_MHCD.shape[1], x_MHCD.shape[-1]
        order, places = self._of_heads(heads)
        rows = _Moved.apply(x_MHCD.reshape(-1, size), places, order)  # type: ignore[no-untyped-call]
        return rows.view(-1, heads, size)  # type: ignore[no-any-return]

    def _of_heads(self, heads: int) -> tuple[Tensor, Tensor]:
        """Indices between `[T·H]` and `[M·H·C]`: of the former's rows in the order of the latter, and the inverse.
        All layers of a pass have the same."""
        if heads not in self._orders:
            head_H = torch.arange(heads, device=self.place_T.device)
            chunk = self.token_MC.shape[1]
            token_MHC = (self.token_MC[:, None] * heads + head_H[:, None]).clamp(max=len(self.place_T) * heads)
            place_TH = (self.place_T // chunk * heads)[:, None] + head_H
            self._orders[heads] = token_MHC.flatten(), (place_TH * chunk + (self.place_T % chunk)[:, None]).flatten()
        return self._orders[heads]


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

    def unit(x_THD: Tensor) -> Tensor:
        return x_THD * torch.rsqrt((x_THD * x_THD).sum(-1, keepdim=True) + EPSILON)

    query, key, value = (
        chunks.take(each) for each in (unit(query_THD.float()), unit(key_THD.float()), value_THD.float())
    )
    gates = chunks.take(torch.stack((decay_TH.float(), beta_TH.float()), -1))
    total, beta = gates[..., :1].cumsum(-2), gates[..., 1:]
    decay = _between(total)
    grown = total.exp()
    query = query * query.shape[-1] ** -0.5
    key_beta, keys = key * beta, key.transpose(-1, -2)
    sides = torch.cat((value * beta, key_beta * grown), -1)
    solved = torch.linalg.solve_triangular(key_beta @ keys * decay, sides, upper=False, unitriangular=True)
    values, read = solved.split((value.shape[-1], key.shape[-1]), -1)
    faded = key * (total[..., -1:, :] - total).exp()
    return chunks.put_back(
        _carried(chunks, (values, read, query * grown, query @ keys * decay, faded, grown[..., -1:, :]))
    )


def _between(total_C1: Tensor) -> Tensor:
    """`[..., C, C]`: by what factor a state shrinks from each position to each later one; 0 for earlier ones."""
    later = torch.ones(total_C1.shape[-2:-1] * 2, dtype=torch.bool, device=total_C1.device).triu_(1)
    return (total_C1 - total_C1.transpose(-1, -2)).masked_fill(later, -torch.inf).exp()


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


def state_space(value_THD: Tensor, key_TGS: Tensor, query_TGS: Tensor, decay_TH: Tensor, chunks: Chunks) -> Tensor:
    """fp32 `[T, H, D]`. The state of a head, `[S, D]`, is multiplied by `exp(decay)` at a token, and its key times its
    value is added; the query reads it after that. Heads of a group have the same keys and queries.

    Dao & Gu, arXiv 2405.21060, section 6.
    """
    heads, size = value_THD.shape[1:]

    def of_groups(x_TH: Tensor) -> Tensor:
        return chunks.take(x_TH.float().reshape(len(x_TH), key_TGS.shape[1], -1))

    def scaled(x_MGCN: Tensor, factor_MGCR: Tensor, more_MGCN: Tensor | None = None) -> Tensor:
        x, factor = x_MGCN.unflatten(-1, (-1, size)), factor_MGCR[..., None]
        if more_MGCN is None:
            return (x * factor).flatten(-2)
        return torch.addcmul(more_MGCN.unflatten(-1, (-1, size)), x, factor).flatten(-2)

    value, total = of_groups(value_THD), of_groups(decay_TH).cumsum(-2)
    key, query = chunks.take(key_TGS.float()), chunks.take(query_TGS.float())
    keys, grown = key.transpose(-1, -2), total.exp()
    shares_MGRCC = (query @ keys)[:, :, None] * _between(total.transpose(-1, -2)[..., None])
    within = (shares_MGRCC @ value.unflatten(-1, (-1, size)).transpose(2, 3)).transpose(2, 3).flatten(-2)
    added = keys @ scaled(value, (total[..., -1:, :] - total).exp())
    states = [torch.zeros_like(added[: chunks.counts[0]])]
    steps = (each.split(chunks.counts) for each in (added, grown[..., -1:, :]))
    for before, more, shrink in zip(chunks.before[1:], *steps, strict=False):
        state = scaled(states[-1], shrink, more)
        states.append(gather_rows(state.flatten(1), before).unflatten(1, added.shape[1:]))
    return chunks.put_back(scaled(query @ torch.cat(states), grown, within)).reshape(-1, heads, size)


def build_runs(rows: Sequence[Row], device: torch.device, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows one after another, each behind the `width - 1` tokens before it.

    Returns:
        Packed index of each position, `[L]`, the number of tokens where there is none; of the sums that begin there,
        `[L - width + 1]`, the token that each is for, or the number of tokens; the sum of each token, `[T]`.
    """
    tokens = sum(row.length for row in rows)
    runs, owns = [], []
    for row in rows:
        end = row.prefix_first + row.prefix_length
        before = np.arange(end - width + 1, end)
        own = np.arange(row.first, row.first + row.length)
        runs += [np.where(before < row.prefix_first, tokens, before) if row.prefix_length else before * 0 + tokens, own]
        owns += [own, before * 0 + tokens]
    own_L = np.concatenate(owns[:-1])
    place_T = np.empty(tokens + 1, np.int64)
    place_T[own_L] = np.arange(len(own_L))
    return to_device(np.concatenate(runs), device), to_device(own_L, device), to_device(place_T[:-1], device)


def pack_recurrence(model: nn.Module) -> bool:
    """Makes transformers' code of this model take packed sequences, if it has the convolution and one of the rules;
    whether it has."""
    code = sys.modules[type(decoder_of(model)).__module__]
    found = [name for name in PACKED if hasattr(code, name)]
    if len(found) < 2:
        return False
    for name in found:
        own = getattr(code, name)
        if getattr(own, "func", None) is not PACKED[name]:
            setattr(code, name, partial(PACKED[name], own))
    return True


class _Convolved(torch.autograd.Function):
    """`[L - W + 1, N]`: sums of `W` rows one after another, each times its row of a frozen `[W, N]`."""

    @staticmethod
    def forward(ctx: Any, x_LN: Tensor, weight_WN: Tensor) -> Tensor:
        ctx.save_for_backward(weight_WN)
        count = len(x_LN) - len(weight_WN) + 1
        out = x_LN[:count] * weight_WN[0]
        for place, weight_N in enumerate(weight_WN[1:], 1):
            out.addcmul_(x_LN[place : place + count], weight_N)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weight_WN,) = ctx.saved_tensors
        out = grad.new_zeros(len(grad) + len(weight_WN) - 1, grad.shape[1])
        for place, weight_N in enumerate(weight_WN):
            out[place : place + len(grad)].addcmul_(grad, weight_N)
        return out, None


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
    run_L, own_L, place_T = orbit_plan.once(("runs", width), lambda: build_runs(rows, x_1NT.device, width))
    run_LN = gather_rows(with_zero_row(x_1NT[0].T), run_L)
    summed = _Convolved.apply(run_LN.float(), weight_NW.T.float().contiguous())  # type: ignore[no-untyped-call]
    out_TN = _Moved.apply(summed, place_T, own_L)  # type: ignore[no-untyped-call]
    out_TN = out_TN if bias_N is None else out_TN + bias_N
    return (out_TN if activation is None else ACT2FN[activation](out_TN)).to(x_1NT.dtype).T[None]  # type: ignore[no-any-return]


def _chunks_of(plan: PackedPlan, key_size: int) -> Chunks:
    size = min(max(key_size // 2, CHUNK[0]), CHUNK[1])
    return plan.once(  # type: ignore[no-any-return]
        ("chunks", size), lambda: build_chunks(plan.batch.rows, plan.batch.token_ids_T.device, size)
    )


def _apply_scan(
    own: Callable[..., Any],
    x_1THD: Tensor,
    step_1TH: Tensor,
    rate_H: Tensor,
    key_1TGS: Tensor,
    query_1TGS: Tensor,
    *args: Any,
    orbit_plan: PackedPlan | None = None,
    **named: Any,
) -> Any:
    """transformers' `mamba2_chunk_scan`; `own` is the one that takes rows."""
    if orbit_plan is None:
        return own(x_1THD, step_1TH, rate_H, key_1TGS, query_1TGS, *args, **named)
    chunks = _chunks_of(orbit_plan, key_1TGS.shape[-1])
    step_TH = F.softplus(step_1TH[0] + named["dt_bias"]).clamp(*named["dt_limit"])
    x_THD = x_1THD[0].float()
    out_THD = state_space(x_THD * step_TH[..., None], key_1TGS[0], query_1TGS[0], rate_H * step_TH.float(), chunks)
    return torch.addcmul(out_THD, named["D"][:, None].float(), x_THD)[None]


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
    chunks = _chunks_of(orbit_plan, query.shape[-1])
    out_THD = delta_rule(query[0], key[0], value[0], named["g"][0], named["beta"][0], chunks)
    return out_THD.to(query.dtype)[None], None


PACKED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _apply_rule,
    "mamba2_chunk_scan": _apply_scan,
}
"""By transformers' name."""
