"""Launches: a weight as a kernel's argument, the grid, and the fastest tile sizes for a weight and a number of tokens.

Belongs here: everything between a Python call and a kernel. Does not belong here: kernels, which path runs (`choice`).

Tile sizes are measured once per process, then cached. Every candidate of a kernel sums in the same order by the same
kind of matrix instruction, so a different choice in another process should not change results; not run on hardware.

Legend: `T` tokens, `E` experts, weight `[N, K]`.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from orbit_runtime.errors import gpu_fault, is_out_of_memory
from orbit_runtime.quant.kernels.matmul import dequantize_kernel, forward_kernel, input_gradient_kernel
from orbit_runtime.quant.kernels.operands import Operands, WeightForm
from orbit_runtime.quant.kernels.tiles import INTERPRETED, Packed

BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Numbers of tokens (for experts: averages) that are tuned; a number in between uses the next larger one's choice."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes of a product, and compiler options."""

    tokens: int
    rows: int
    columns: int
    num_warps: int = 4
    num_stages: int = 3


_remembered: dict[Hashable, Tiles] = {}
_log = logging.getLogger(__name__)


def tuned(
    key: Hashable, num_tokens: int, choices: Sequence[Tiles], run: Callable[[Tiles], None], *, measures: bool = True
) -> Tiles:
    """The choice for `key` and the bucket of `num_tokens`.

    Args:
        measures: if False, returns the choice that fits the number of tokens best, without running anything.
    """
    bucket = BUCKETS[min(bisect.bisect_left(BUCKETS, num_tokens), len(BUCKETS) - 1)]
    if not measures:
        return fitting(choices, bucket)
    found = _remembered.get((key, bucket))
    if found is None:
        found = _remembered[key, bucket] = quickest(candidates(choices, bucket), run, _median_ms)
        _log.debug("kernel %s, %d tokens: %s", key, bucket, found)
    return found


def fitting(choices: Sequence[Tiles], num_tokens: int) -> Tiles:
    """The first choice with the largest tile that does not exceed the number of tokens; otherwise the smallest."""
    within = [each for each in choices if each.tokens <= num_tokens]
    return max(within, key=lambda each: each.tokens) if within else min(choices, key=lambda each: each.tokens)


def candidates(choices: Sequence[Tiles], num_tokens: int) -> list[Tiles]:
    """Choices whose tile does not exceed the number of tokens, and those with the smallest tile."""
    smallest = min(each.tokens for each in choices)
    return [each for each in choices if each.tokens <= max(num_tokens, smallest)]


def quickest(
    choices: Sequence[Tiles], run: Callable[[Tiles], None], measure: Callable[[Callable[[], None]], float]
) -> Tiles:
    """The fastest choice. One that does not compile, or needs more registers or memory than the device has, is passed
    over and logged; if nothing can be measured because memory is short, the first choice is taken.

    Raises:
        Exception: of the last choice, if none runs; or the first fault of the device itself.
    """
    times: dict[Tiles, float] = {}
    failed: Exception | None = None
    for tiles in choices:
        try:
            times[tiles] = measure(lambda tiles=tiles: run(tiles))  # type: ignore[misc]
        except Exception as error:
            if gpu_fault(error) is not None:
                raise
            _log.info("%s is passed over: %s: %s", tiles, type(error).__name__, str(error)[:200])
            failed = error
    if times:
        return min(times, key=lambda tiles: times[tiles])
    assert failed is not None
    if is_out_of_memory(failed):
        return choices[0]
    raise failed


def _median_ms(function: Callable[[], None]) -> float:
    import triton.testing

    return float(triton.testing.do_bench(function, warmup=5, rep=25, return_mode="median"))


TALL = 8
"""Number of token tiles processed side by side, so that the caches still hold the weight they share."""


@dataclass(frozen=True, slots=True)
class WeightTile:
    """A tile of the weight, and the number of warps that process it."""

    rows: int
    columns: int
    num_warps: int = 4


FORWARD_TILES = (
    Tiles(16, 64, 128, 4, 4),
    Tiles(32, 64, 128, 4, 4),
    Tiles(64, 64, 128, 4, 4),
    Tiles(64, 128, 64, 4, 4),
    Tiles(128, 64, 64, 4, 4),
    Tiles(128, 128, 64, 8, 4),
    Tiles(256, 128, 64, 8, 3),
)
"""Columns are a power of two of at least 64, so that a tile holds whole groups of 16, 32 and 64, or lies inside a group
of 128; rows stay at 128, the side of an FP8 block. Not tried on hardware."""
GRADIENT_TILES = (
    Tiles(64, 64, 64, 4, 4),
    Tiles(64, 64, 128, 4, 4),
    Tiles(128, 64, 64, 4, 3),
    Tiles(128, 64, 128, 8, 4),
    Tiles(256, 64, 128, 8, 3),
)
"""Tiles for the gradient. Those of fewer than 64 tokens would be multiplied by another instruction, whose sums may
differ in the last bits. A fourth stage would make 128 x 64 x 64 spill 8 bytes for FP8 blocks on capability 10.0; FP8
with one scale per tensor spills 8 bytes in it all the same, and, as FP8 blocks do, 24 in the forward 64 x 128 x 64; on
9.0, INT4Asymmetric of experts spills 8 in the forward 256 x 128 x 64."""
DEQUANTIZE_BLOCK = WeightTile(16, 512)
DEQUANTIZE_FP8_BLOCK = WeightTile(64, 128)
"""Inside one block of 128 x 128, so that a program reads only one scale."""


def packed_argument(operands: Operands) -> Packed:
    """The kernels' argument. Strides are those of contiguous tensors; a single weight is a stack of one."""
    form = operands.form
    codes, scale, extra = operands.tensors
    return Packed(
        codes=codes,
        scale=scale,
        extra=extra,
        rows=form.rows,
        columns=form.columns,
        row_bytes=codes.shape[-1],
        codes_stride=codes.numel() // form.num_experts,
        scale_stride=scale.numel() // form.num_experts,
        extra_stride=extra.numel() // form.num_experts,
    )


def dequantize(
    operands: Operands, *, first_row: int = 0, num_rows: int | None = None, block: WeightTile | None = None
) -> Tensor:
    """BF16 `[E, num_rows, K]`: these rows of every expert, by default all. `first_row` is a multiple of 128."""
    form = operands.form
    assert first_row % 128 == 0, first_row
    num_rows = form.rows - first_row if num_rows is None else num_rows
    block = block or (DEQUANTIZE_FP8_BLOCK if form.kind == "FP8Block" else DEQUANTIZE_BLOCK)
    dense = operands.codes.new_empty((form.num_experts, num_rows, form.columns), dtype=torch.bfloat16)
    grid = (triton.cdiv(num_rows, block.rows), triton.cdiv(form.columns, block.columns), form.num_experts)
    dequantize_kernel[grid](
        packed_argument(operands),
        dense,
        first_row,
        num_rows,
        KIND=form.kind,
        GROUP=form.group,
        R=block.rows,
        C=block.columns,
        num_warps=block.num_warps,
    )
    return dense


def forward(
    x_TK: Tensor,
    operands: Operands,
    *,
    bias: Tensor | None = None,
    offsets_E: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """`x @ W.T + bias`, BF16 `[T, N]`; with offsets, each token uses its expert's weight. `tiles` None: autotuned."""
    form, x_TK = operands.form, x_TK.contiguous()
    y_TN = x_TK.new_empty(len(x_TK), form.rows)
    arguments = (packed_argument(operands), x_TK, x_TK if bias is None else bias.float(), y_TN)
    flags = {"HAS_BIAS": bias is not None}
    _launch(forward_kernel, FORWARD_TILES, form, arguments, flags, (len(x_TK), offsets_E), tiles)
    return y_TN


def input_gradient(
    dy_TN: Tensor, operands: Operands, *, offsets_E: Tensor | None = None, tiles: Tiles | None = None
) -> Tensor:
    """`dy @ W`, BF16 `[T, K]`; with offsets, each token uses its expert's weight."""
    form, dy_TN = operands.form, dy_TN.contiguous()
    dx_TK = dy_TN.new_empty(len(dy_TN), form.columns)
    arguments = (packed_argument(operands), dy_TN, dx_TK)
    _launch(input_gradient_kernel, GRADIENT_TILES, form, arguments, {}, (len(dy_TN), offsets_E), tiles)
    return dx_TK


def schedule(offsets_E: Tensor, num_tokens: int, block: int, width: int) -> Tensor:
    """int32 `[2 · width]`: the end of each expert's tokens, and the end of its tiles of `block` tokens.

    Tokens after the last offset belong to an additional expert without a weight; the rest of `width` has no tokens.
    Computed on the device, so the host does not wait to read the offsets.
    """
    ends = torch.nn.functional.pad(offsets_E.to(torch.int32), (0, width - len(offsets_E)), value=num_tokens)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    return torch.cat([ends, ((counts + block - 1) // block).cumsum(0, dtype=torch.int32)])


def _launch(
    kernel: Any,
    choices: Sequence[Tiles],
    form: WeightForm,
    arguments: tuple[Any, ...],
    flags: dict[str, Any],
    tokens: tuple[int, Tensor | None],
    tiles: Tiles | None,
) -> None:
    """`arguments`: those before the token schedule; `tokens`: their number and the experts' offsets."""
    num_tokens, offsets_E = tokens
    if num_tokens == 0:
        return
    forwards = kernel is forward_kernel
    width = 1 if offsets_E is None else triton.next_power_of_2(len(offsets_E) + 1)

    def run(tiles: Tiles) -> None:
        num_tiles = triton.cdiv(num_tokens, tiles.tokens) + (0 if offsets_E is None else width)
        side = triton.cdiv(form.rows, tiles.rows) if forwards else triton.cdiv(form.columns, tiles.columns)
        even = form.columns % tiles.columns == 0 if forwards else form.rows % tiles.rows == 0
        table = arguments[1] if offsets_E is None else schedule(offsets_E, num_tokens, tiles.tokens, width)
        kernel[(num_tiles * side,)](
            *arguments,
            table,
            num_tiles,
            num_tokens,
            form.num_experts,
            KIND=form.kind,
            GROUP=form.group,
            GROUPED=offsets_E is not None,
            EXPERTS=width,
            **flags,
            EVEN=even,
            BLOCK_T=tiles.tokens,
            BLOCK_N=tiles.rows,
            BLOCK_K=tiles.columns,
            TALL=TALL,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )

    if tiles is None:
        each = num_tokens if offsets_E is None else triton.cdiv(num_tokens, form.num_experts)
        key = (kernel.__name__, form, offsets_E is not None, arguments[1].device)
        tiles = tuned(key, each, choices, run, measures=not INTERPRETED.value)
    run(tiles)
