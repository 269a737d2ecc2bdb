"""Tensors sent between processes as bytes, so that unpickling a rank's message does not need Megatron-Core.

Megatron-Core replaces the function that unpickles torch's storages with one of its own, so a tensor from a rank would
import all of Megatron-Core, with its warnings, into the process that leads the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: np.ndarray
    """uint8, one-dimensional."""


def send[K](tensors: Mapping[K, Tensor]) -> dict[K, PackedTensor]:
    return {key: _pack(tensor) for key, tensor in tensors.items()}


def receive[K](sent: Mapping[K, PackedTensor]) -> dict[K, Tensor]:
    """Tensors on the CPU."""
    return {key: torch.from_numpy(each.data).view(each.dtype).view(each.shape) for key, each in sent.items()}


def _pack(tensor: Tensor) -> PackedTensor:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return PackedTensor(tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy())
