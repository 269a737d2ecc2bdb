"""BF16: the weight as the checkpoint stores it. The oracle is the file itself; widening to fp32 is exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orbit_runtime.errors import ModelError


@dataclass(frozen=True, slots=True, eq=False)
class BF16Weight:
    """A weight of shape `[N, K]` (out, in).

    qdata: bfloat16 `[N, K]`
    """

    qdata: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return (self.qdata.shape[0], self.qdata.shape[1])

    @property
    def block_size(self) -> int:
        return 1


def tensor_names(prefix: str) -> tuple[str, ...]:
    """Checkpoint names of the module's tensors."""
    return (f"{prefix}.weight",)


def from_checkpoint(tensors: Mapping[str, Tensor], name: str) -> BF16Weight:
    """The weight of module `name` from its checkpoint tensors, unchanged."""
    (key,) = tensor_names(name)
    if key not in tensors:
        raise ModelError("the tensor is missing from the checkpoint", where=key)
    qdata = tensors[key]
    if qdata.dtype != torch.bfloat16 or qdata.ndim != 2:
        raise ModelError(
            f"expected a bfloat16 matrix, found {qdata.dtype} {list(qdata.shape)}",
            where=key,
            fix="write it anew: orbit convert FOLDER NEW --precision BF16",
        )
    return BF16Weight(qdata)


def quantize(w: Tensor) -> BF16Weight:
    """Rounds to nearest even."""
    return BF16Weight(w.to(torch.bfloat16).contiguous())


def views(qdata: Tensor) -> tuple[Tensor]:
    return (qdata,)


def dense_rows(qdata: Tensor) -> Tensor:
    return qdata


def dequantize(weight: BF16Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return weight.qdata.to(dtype)


def buffers(weight: BF16Weight) -> dict[str, Tensor]:
    """The packed tensors by checkpoint name, relative to the module, in the order that `dense_rows` takes."""
    return {"weight": weight.qdata}


def from_buffers(tensors: Mapping[str, Tensor]) -> BF16Weight:
    return BF16Weight(tensors["weight"])


def num_bytes(weight: BF16Weight) -> int:
    return weight.qdata.nbytes


def stack(weights: Sequence[BF16Weight]) -> BF16Weight:
    """The rows of several weights, concatenated."""
    return BF16Weight(torch.cat([weight.qdata for weight in weights]))
