"""The kernel packed → dense BF16, for a weight or a stack of experts: memory-bound, each byte moves once.

Belongs here: that kernel. Does not belong here: its launch (`launch`), any product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from orbit_runtime.quant.kernels.tiles import load_tile, of_expert, stored


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
