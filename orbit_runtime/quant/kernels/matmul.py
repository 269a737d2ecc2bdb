"""Fused kernels: x times a packed weight, and the gradient of x; the dense weight exists only in registers.

`forward_kernel` is `x @ W.T`, `input_gradient_kernel` is `dy @ W`: BF16 products, one fp32 accumulator per element, and
a reduction that is not split and runs upwards, so the tile size should not change the order of the sum. Nor does it
change the kind of matrix instruction that adds: `launch` has no tile for which a device would use another.

The forward pass computes `W @ x.T`: a Hopper MMA can take its left operand from registers, where the dequantised tile
already is. For the gradient the tile goes through shared memory, because its reduction runs along the rows of W.

`dequantize_kernel` makes a weight or a stack of experts dense in BF16: memory-bound, each byte moves once.

Belongs here: these three kernels. Does not belong here: the values of tiles (`tiles`), grids and configurations
(`launch`).

Legend: `T` tokens (rows of x), `E` experts, weight `[N, K]`; GROUPED: tokens are sorted by expert.
"""

from __future__ import annotations

import triton
import triton.language as tl

from orbit_runtime.quant.kernels.tiles import load_tile, loaded, of_expert, round_to_bf16, stored


@triton.jit
def place_in_grid(num_tiles, num_columns, TALL: tl.constexpr):
    """Program → (tile of tokens, tile of outputs): TALL tiles of tokens share the part of the weight in the caches."""
    program = tl.program_id(0)
    in_band = TALL * num_columns
    first = program // in_band * TALL
    height = tl.minimum(num_tiles - first, TALL)
    return first + program % in_band % height, program % in_band // height


@triton.jit
def tokens_of_tile(tile, tokens, num_tokens, GROUPED: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Tile of tokens → expert, first token, end. `tokens` is `launch.schedule`'s; a surplus tile has start = end."""
    if GROUPED:
        lanes = tl.arange(0, EXPERTS)
        ends = tl.load(tokens + EXPERTS + lanes)
        # An expert without tokens ends where its predecessor does, so it is skipped.
        expert = tl.sum((ends <= tile).to(tl.int32), 0)
        before = tl.max(tl.where(lanes < expert, ends, 0), 0)
        offsets = tl.load(tokens + lanes)
        start = tl.max(tl.where(lanes < expert, offsets, 0), 0)
        stop = tl.max(tl.where(lanes == expert, offsets, 0), 0)
        return expert, start + (tile - before) * BLOCK_T, stop
    else:
        return tile * 0, tile * BLOCK_T, num_tokens


@triton.jit(do_not_specialize=["num_tiles", "num_tokens", "num_experts"])
def forward_kernel(
    w,
    x,
    bias,
    y,
    tokens,
    num_tiles,
    num_tokens,
    num_experts,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPED: tl.constexpr,
    EXPERTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TALL: tl.constexpr,
):
    tile, column = place_in_grid(num_tiles, tl.cdiv(w.rows, BLOCK_N), TALL)
    expert, first, stop = tokens_of_tile(tile, tokens, num_tokens, GROUPED, EXPERTS, BLOCK_T)
    if first >= stop:
        return
    n0 = column * BLOCK_N
    t = first + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    x_rows = x + t.to(tl.int64)[:, None] * w.columns
    sum_NT = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    base = of_expert(w, expert)
    for k0 in range(0, tl.where(expert < num_experts, w.columns, 0), BLOCK_K):
        w_NK = load_tile(w, base, n0, k0, KIND, GROUP, BLOCK_N, BLOCK_K)
        inside = (t < stop)[:, None]
        if not EVEN:
            inside = inside & (k0 + k < w.columns)[None, :]
        x_TK = tl.load(x_rows + (k0 + k)[None, :], mask=inside, other=0.0)
        sum_NT = tl.dot(w_NK, tl.trans(loaded(x_TK)), sum_NT)
    n = n0 + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        sum_NT += tl.load(bias + n, mask=n < w.rows, other=0.0)[:, None]
    y_TN = stored(round_to_bf16(tl.trans(sum_NT)))
    place = t.to(tl.int64)[:, None] * w.rows + n[None, :]
    tl.store(y + place, y_TN, mask=(t < stop)[:, None] & (n < w.rows)[None, :])


@triton.jit(do_not_specialize=["num_tiles", "num_tokens", "num_experts"])
def input_gradient_kernel(
    w,
    dy,
    dx,
    tokens,
    num_tiles,
    num_tokens,
    num_experts,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPED: tl.constexpr,
    EXPERTS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TALL: tl.constexpr,
):
    tile, column = place_in_grid(num_tiles, tl.cdiv(w.columns, BLOCK_K), TALL)
    expert, first, stop = tokens_of_tile(tile, tokens, num_tokens, GROUPED, EXPERTS, BLOCK_T)
    if first >= stop:
        return
    k0 = column * BLOCK_K
    t = first + tl.arange(0, BLOCK_T)
    n = tl.arange(0, BLOCK_N)
    dy_rows = dy + t.to(tl.int64)[:, None] * w.rows
    sum_TK = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    base = of_expert(w, expert)
    for n0 in range(0, tl.where(expert < num_experts, w.rows, 0), BLOCK_N):
        w_NK = load_tile(w, base, n0, k0, KIND, GROUP, BLOCK_N, BLOCK_K)
        inside = (t < stop)[:, None]
        if not EVEN:
            inside = inside & (n0 + n < w.rows)[None, :]
        dy_TN = tl.load(dy_rows + (n0 + n)[None, :], mask=inside, other=0.0)
        sum_TK = tl.dot(loaded(dy_TN), w_NK, sum_TK)
    k = k0 + tl.arange(0, BLOCK_K)
    dx_TK = stored(round_to_bf16(sum_TK))
    place = t.to(tl.int64)[:, None] * w.columns + k[None, :]
    tl.store(dx + place, dx_TK, mask=(t < stop)[:, None] & (k < w.columns)[None, :])


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def dequantize_kernel(
    w, dense, first_row, num_rows, KIND: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """Rows `first_row` up to `first_row + num_rows` of every expert; `first_row` is a multiple of R."""
    expert = tl.program_id(2)
    row, column = tl.program_id(0) * R, tl.program_id(1) * C
    tile = load_tile(w, of_expert(w, expert), first_row + row, column, KIND, GROUP, R, C)
    rows = row + tl.arange(0, R)[:, None]
    columns = column + tl.arange(0, C)[None, :]
    place = (expert.to(tl.int64) * num_rows + rows) * w.columns + columns
    tl.store(dense + place, stored(tile), mask=(rows < num_rows) & (columns < w.columns))
