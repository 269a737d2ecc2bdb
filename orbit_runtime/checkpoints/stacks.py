"""Weights of all experts of a layer in one tensor, as gpt-oss has them, read one expert at a time.

BF16     `….experts.gate_up_proj` `[E, K, N]`: x times it, so each expert's weight is turned
MXFP4    `….experts.gate_up_proj_blocks` `[E, N, K/32, 16]`, `…_scales` `[E, N, K/32]`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orbit_runtime.checkpoints.tensor_files import TensorSource
from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.layouts import StoredLinear
from orbit_runtime.quant.formats import FORMATS

ENDINGS = (".experts.gate_up_proj", ".experts.down_proj")


@dataclass(frozen=True, slots=True)
class Stack:
    """The weights `[N, K]` of E experts. Example: `Stack("….experts.down_proj", 32, 2880, 2880, "BF16", …)`."""

    module: str
    num_experts: int
    rows: int
    """N."""
    columns: int
    """K."""
    layout: str
    """`BF16` or `MXFP4GptOss`."""
    tensors: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the tensor in BF16: `[E, K, N]`."""
        return self.num_experts, self.columns, self.rows

    def experts(self) -> tuple[str, ...]:
        """Names for the weights of the experts, which have none in the file."""
        return tuple(f"{self.module}.{expert}" for expert in range(self.num_experts))


def find_stacks(
    config: Mapping[str, Any], source: TensorSource, linears: Mapping[str, StoredLinear]
) -> dict[str, Stack]:
    """The checkpoint's stacks by module.

    Args:
        config: config.json.
        linears: the packed modules.
    """
    found = {
        linear.module: Stack(
            linear.module, linear.experts, linear.rows, linear.columns, linear.layout, tuple(linear.tensors)
        )
        for linear in linears.values()
        if linear.layout == "MXFP4GptOss"
    }
    if config.get("model_type") == "gpt_oss":
        for name, info in source.infos().items():
            if name.endswith(ENDINGS) and len(info.shape) == 3 and info.dtype == "BF16":
                experts, columns, rows = info.shape
                found[name] = Stack(name, experts, rows, columns, "BF16", (name,))
    return found


def read_expert(source: TensorSource, stack: Stack, expert: int) -> Tensor:
    """fp32 `[N, K]`.

    Raises:
        ModelError: the file is damaged.
    """
    parts = {name: source.read_part(name, expert) for name in stack.tensors}
    if stack.layout == "BF16":
        return parts[stack.module].t().float()
    codec = FORMATS[stack.layout]
    try:
        weight = codec.from_checkpoint({name: part.unsqueeze(0) for name, part in parts.items()}, stack.module)
    except ModelError as error:
        where = source.where(error.where) if error.where in source.tensors else error.where
        raise ModelError(error.message, where=where, fix=error.fix) from None
    dense: Tensor = codec.dequantize(weight, torch.float32)
    return dense
