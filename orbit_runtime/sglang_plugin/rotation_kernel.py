"""Rotates every row by its own slot's R in one kernel, which a server runs in each layer of a pass.

A loop over slots launches two products and a choice for each slot of the server, whether the batch uses it or not, and
reads and writes all rows every time. Here each row is read and written once, and only the slots of rows that lie beside
each other are looked at. Sums run upwards over a block of features in fp32, whatever else is in the batch.

Legend: `T` rows, `S` slots, `n` blocks of `b` features, x `[T, n b]`, R `[S, n, b, b]`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from orbit_runtime.quant.kernels.tiles import loaded, round_to_bf16, stored

ROWS = 64
"""Rows of a tile. Fixed: another size may use another matrix instruction, with another order of sums."""
LARGEST_STEP = 64
SMALLEST_STEP = 16
"""Features of a tile: `tl.dot` takes no fewer."""


@triton.jit
def values(x, IS_BF16: tl.constexpr):
    """Values from memory → the dtype that `tl.dot` takes here."""
    if IS_BF16:
        return loaded(x)
    else:
        return x


@triton.jit(do_not_specialize=["num_rows"])
def rotation_kernel(
    x,
    R,
    slots,
    y,
    num_rows,
    x_row,
    y_row,
    slot_stride,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    IS_BF16: tl.constexpr,
):
    pieces: tl.constexpr = (SIZE + STEP - 1) // STEP
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block, piece = tl.program_id(1) // pieces, tl.program_id(1) % pieces
    here = t < num_rows
    slot_T = tl.load(slots + t, mask=here, other=-1)
    features, out = tl.arange(0, STEP), piece * STEP + tl.arange(0, STEP)
    x_rows = x + t.to(tl.int64)[:, None] * x_row + block * SIZE
    wanted = here[:, None] & (out < SIZE)[None, :]
    kept = tl.load(x_rows + out[None, :], mask=wanted, other=0.0)
    turned = tl.zeros((ROWS, STEP), tl.float32)
    last = tl.max(slot_T, 0)
    first = tl.min(tl.where(slot_T < 0, last, slot_T), 0)
    for slot in range(tl.maximum(first, 0), last + 1):
        is_its = slot_T == slot
        if tl.max(is_its.to(tl.int32), 0) > 0:
            sums = tl.zeros((ROWS, STEP), tl.float32)
            R_block = R + tl.cast(slot, tl.int64) * slot_stride + block * SIZE * SIZE
            for start in range(0, SIZE, STEP):
                k = start + features
                x_Tk = tl.load(x_rows + k[None, :], mask=here[:, None] & (k < SIZE)[None, :], other=0.0)
                inside = (k < SIZE)[:, None] & (out < SIZE)[None, :]
                R_ko = tl.load(R_block + k[:, None] * SIZE + out[None, :], mask=inside, other=0.0)
                sums = tl.dot(values(x_Tk, IS_BF16), values(R_ko, IS_BF16), sums, input_precision="ieee")
            # Chosen, not added: what an unused row's product would be does not count, be it infinite.
            turned = tl.where(is_its[:, None], sums, turned)
    place = y + t.to(tl.int64)[:, None] * y_row + block * SIZE + out[None, :]
    is_turned = (slot_T >= 0)[:, None]
    if IS_BF16:
        tl.store(place, tl.where(is_turned, stored(round_to_bf16(turned)), kept), mask=wanted)
    else:
        tl.store(place, tl.where(is_turned, turned, kept), mask=wanted)


def rotate_rows(x_TK: Tensor, R_Snbb: Tensor, slots_T: Tensor) -> Tensor:
    """Each row rotated by the R of its slot: `x[t] @ blockdiag(R[slots[t]])`; rows of a negative slot unchanged.

    Args:
        x_TK: BF16 or fp32; rows may lie apart, features may not.
        R_Snbb: in x's dtype; slots may lie apart.
        slots_T: int32. Read on the device alone, so a CUDA graph may replay this with others.
    """
    _, blocks, size, _ = R_Snbb.shape
    num_rows, width = x_TK.shape
    assert width == blocks * size, f"{width} features, R has {blocks} blocks of {size}"
    assert x_TK.dtype == R_Snbb.dtype
    assert slots_T.dtype == torch.int32
    assert len(slots_T) >= num_rows
    assert R_Snbb.stride()[1:] == (size * size, size, 1)
    x_TK = x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous()
    y_TK = torch.empty((num_rows, width), dtype=x_TK.dtype, device=x_TK.device)
    if not num_rows:
        return y_TK
    step = min(LARGEST_STEP, max(SMALLEST_STEP, triton.next_power_of_2(size)))
    rotation_kernel[triton.cdiv(num_rows, ROWS), blocks * triton.cdiv(size, step)](
        x_TK,
        R_Snbb,
        slots_T,
        y_TK,
        num_rows,
        x_TK.stride(0),
        y_TK.stride(0),
        R_Snbb.stride(0),
        SIZE=size,
        STEP=step,
        ROWS=ROWS,
        IS_BF16=x_TK.dtype == torch.bfloat16,
        num_warps=4,
    )
    return y_TK
