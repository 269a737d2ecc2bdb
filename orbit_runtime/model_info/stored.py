"""The bytes that each on-disk format needs for a weight, and its tensor names.

Belongs here: sizes and names. Does not belong here: the bits and scales themselves (`quant`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ENDINGS = (
    ".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_scale_inv", ".weight_scale_2",
    ".weight_global_scale", ".input_global_scale", ".input_scale", ".k_scale", ".v_scale", ".qweight", ".qzeros",
    ".scales", ".g_idx", "_blocks", "_scales", ".scale", ".weight",
)  # fmt: skip
"""Endings that formats use instead of `.weight`; longer ones precede those that they end with."""


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """Example: INT4 in groups of 32 is `StoredFormat("INT4", 4, (1, 32), 2, 8)`: 0.5625 bytes per parameter."""

    name: str
    """Its name in `model.precision`."""
    bits: int
    block: tuple[int, int] | None = None
    """Rows and columns under one scale; None without scales. 0 columns means a whole row."""
    scale_bytes: int = 0
    extra_bytes: int = 0
    """Bytes per tensor for shapes and global scales."""

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of one weight of this shape."""
        size = math.prod(shape) * self.bits // 8
        if self.block is None:
            return size
        rows, columns = shape[-2:]
        across = math.ceil(columns / self.block[1]) if self.block[1] else 1
        return size + math.ceil(rows / self.block[0]) * across * self.scale_bytes + self.extra_bytes


STORED: dict[str, StoredFormat] = {
    "BF16": StoredFormat("BF16", 16),
    "F32": StoredFormat("F32", 32),
    "I64": StoredFormat("I64", 64),
    # compressed-tensors pack-quantized: BF16 scales and an int32 [2] shape.
    "INT4/32": StoredFormat("INT4", 4, (1, 32), 2, 8),
    "INT4/128": StoredFormat("INT4", 4, (1, 128), 2, 8),
    # DeepSeek-V3 and Qwen3-FP8: 128 x 128 blocks; DeepSeek-V4 writes the scales as E8M0.
    "FP8/128": StoredFormat("FP8", 8, (128, 128), 4),
    "FP8/128/E8M0": StoredFormat("FP8", 8, (128, 128), 1),
    # compressed-tensors float-quantized by output channel, BF16 scales.
    "FP8/channel": StoredFormat("FP8", 8, (1, 0), 2),
    # ModelOpt: E4M3 scales, weight_scale_2 and input_scale in fp32.
    "NVFP4/16": StoredFormat("NVFP4", 4, (1, 16), 1, 8),
    "MXFP4/32": StoredFormat("MXFP4", 4, (1, 32), 1),
}
PRECISIONS = ("BF16", "FP8", "INT4", "NVFP4", "MXFP4")
