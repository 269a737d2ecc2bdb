"""Device functions: a rectangle of a packed weight, loaded and dequantised in registers, bit-identical to the codec.

The order of operations is the codec's: code and scale widened to fp32, one product (NVFP4's two scales are combined
first), one rounding to BF16. Nothing here is fused into an FMA: no product is followed by a sum.

Triton's interpreter truncates fp32 → BF16 instead of rounding, and multiplies BF16 as integers. Under it a "BF16" value
is rounded in integers and stays in fp32, where products of such values are exact.

Belongs here: operations on a tile in registers. Does not belong here: loops, grids, the layouts on the host.

Legend: weight `[N, K]`; a tile is `[R, C]` at (row, column), both multiples of the tile's sides.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether `TRITON_INTERPRET=1` was set when the kernels were imported: they then run in Python, on a CPU."""


class Packed(NamedTuple):
    """A weight, or a stack of experts' weights, in the form that kernels take; built by `operands.build_operands`."""

    codes: object
    """uint8 `[E, N, row_bytes]`: two codes per byte, even column in the low nibble; or E4M3, one per byte."""
    scale: object
    """Floats, or uint8 for E4M3 and E8M0, or uint16 for the bits of BF16."""
    extra: object
    """INT4Asymmetric: zero points, int32 `[E, ceil(N/8), K/group]`. NVFP4: the global scale, fp32 `[E]`."""
    rows: object
    columns: object
    row_bytes: object
    codes_stride: object
    scale_stride: object
    extra_stride: object
    """Elements from one expert to the next."""


@triton.jit
def of_expert(w, expert):
    """The offset of the expert's own weight, in 64 bits: a stack is larger than 2^31 bytes."""
    e = expert.to(tl.int64)
    return (
        w.codes + e * w.codes_stride,
        w.scale + e * w.scale_stride,
        w.extra + e * w.extra_stride,
    )


@triton.jit
def round_to_bf16(x):
    """fp32 → BF16, nearest, ties to even; under the interpreter the same value in fp32."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, rounded, 0x7FC00000).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def stored(x):
    """Result of `round_to_bf16` → BF16, for a store."""
    if INTERPRETED:
        return (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x


@triton.jit
def loaded(x):
    """BF16 from memory → the dtype that `tl.dot` takes here."""
    if INTERPRETED:
        return widen(x.to(tl.uint16, bitcast=True))
    else:
        return x


@triton.jit
def widen(bits):
    """The bits of BF16 (uint16) → fp32."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def scale_to_fp32(s, KIND: tl.constexpr):
    if s.dtype == tl.uint16:
        return widen(s)
    elif s.dtype == tl.uint8:
        if (KIND == "NVFP4") or (KIND == "NVFP4ModelOpt"):
            return s.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            # E8M0: s means 2^(s-127), which is subnormal for 0.
            bits = tl.where(s == 0, 0x00400000, s.to(tl.uint32) << 23)
            return bits.to(tl.float32, bitcast=True)
    else:
        return s.to(tl.float32)


@triton.jit
def code_to_fp32(code, zero, KIND: tl.constexpr):
    """A nibble 0..15 → its value; `zero` is INT4Asymmetric's zero point, also 0..15."""
    if (KIND == "INT4") or (KIND == "INT4Asymmetric"):
        # 128 + code, assembled from bits: faster than converting an integer. The difference is exact.
        shifted = (0x43000000 | (code.to(tl.uint32) << 16)).to(tl.float32, bitcast=True)
        return shifted - (zero + 128.0)
    else:
        # E2M1's bits as the low exponent and the high mantissa bits of fp32; 2^126 corrects the exponent bias.
        bits = ((code & 7).to(tl.uint32) << 22) | ((code & 8).to(tl.uint32) << 28)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def group_scales(w, base, rows, groups, inside, KIND: tl.constexpr, GROUP: tl.constexpr):
    """Scales and zero points at (rows, groups), both of which broadcast to the shape of the result."""
    _, scale, extra = base
    per_row = w.columns // GROUP
    s = tl.load(scale + rows.to(tl.int64) * per_row + groups, mask=inside, other=0)
    s = scale_to_fp32(s, KIND)
    if KIND == "NVFP4":
        s = tl.div_rn(s, tl.broadcast_to(tl.load(extra), s.shape))
    if KIND == "NVFP4ModelOpt":
        s = s * tl.load(extra)
    if KIND == "INT4Asymmetric":
        words = tl.load(extra + (rows // 8).to(tl.int64) * per_row + groups, mask=inside, other=0)
        zero = ((words >> (rows % 8 * 4)) & 15).to(tl.float32)
    else:
        zero = tl.full(s.shape, 8.0, tl.float32)
    return s, zero


@triton.jit
def nibble_tile(w, base, row, column, KIND: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    codes = base[0]
    half: tl.constexpr = C // 2
    span: tl.constexpr = GROUP // 2
    rows = row + tl.arange(0, R)[:, None]
    places = column // 2 + tl.arange(0, half)[None, :]
    inside = (rows < w.rows) & (places < w.columns // 2)
    packed = tl.load(codes + rows.to(tl.int64) * w.row_bytes + places, mask=inside, other=0)
    if C % GROUP == 0:
        count: tl.constexpr = C // GROUP
        groups = column // GROUP + tl.arange(0, count)[None, :]
        in_groups = (rows < w.rows) & (groups < w.columns // GROUP)
        s, zero = group_scales(w, base, rows, groups, in_groups, KIND, GROUP)
        s = tl.reshape(tl.broadcast_to(s[:, :, None], (R, count, span)), (R, half))
        zero = tl.reshape(tl.broadcast_to(zero[:, :, None], (R, count, span)), (R, half))
    elif GROUP % C == 0:
        # One scale a row, loaded as a vector: Triton finds no layout in shared memory for a column of [R, 1] on
        # capability 10.0.
        every, group = row + tl.arange(0, R), column // GROUP
        s, zero = group_scales(w, base, every, group, (every < w.rows) & (group < w.columns // GROUP), KIND, GROUP)
        s, zero = s[:, None], zero[:, None]
    else:
        s, zero = group_scales(w, base, rows, places // span, inside, KIND, GROUP)
    low = code_to_fp32(packed & 15, zero, KIND) * s
    high = code_to_fp32(packed >> 4, zero, KIND) * s
    return tl.interleave(round_to_bf16(low), round_to_bf16(high))


@triton.jit
def byte_tile(w, base, row, column, KIND: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    codes, scale, _ = base
    rows = row + tl.arange(0, R)[:, None]
    columns = column + tl.arange(0, C)[None, :]
    inside = (rows < w.rows) & (columns < w.columns)
    bits = tl.load(codes + rows.to(tl.int64) * w.row_bytes + columns, mask=inside, other=0)
    values = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if KIND == "FP8Tensor":
        s = tl.load(scale)
    elif KIND == "FP8Row":
        s = tl.load(scale + rows, mask=rows < w.rows, other=0)
    else:
        per_row = tl.cdiv(w.columns, GROUP)
        if (GROUP % R == 0) and (GROUP % C == 0):
            s = tl.load(scale + (row // GROUP) * per_row + column // GROUP, mask=row < w.rows, other=0)
        else:
            s = tl.load(scale + (rows // GROUP) * per_row + columns // GROUP, mask=inside, other=0)
    return round_to_bf16(values * scale_to_fp32(s, KIND))


@triton.jit
def load_tile(w, base, row, column, KIND: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """`W[row : row+R, column : column+C]` as BF16, 0 outside of the weight.

    Args:
        base: result of `of_expert`.
        KIND: `Form.kind`. GROUP: `Form.group`.
    """
    if (KIND == "FP8Tensor") or (KIND == "FP8Row") or (KIND == "FP8Block"):
        return byte_tile(w, base, row, column, KIND, GROUP, R, C)
    else:
        return nibble_tile(w, base, row, column, KIND, GROUP, R, C)
