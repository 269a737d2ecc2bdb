"""What codecs share: checks of checkpoint tensors (present, of the right kind, with usable scales), and the product of
codes and scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from orbit_runtime.errors import ModelError

DAMAGED = "the file is damaged or mislabelled: download the model again"


def take(tensors: Mapping[str, Tensor], names: Sequence[str]) -> list[Tensor]:
    """The tensors of these names, in order."""
    for name in names:
        if name not in tensors:
            raise ModelError("the tensor is missing from the checkpoint", where=name, fix=DAMAGED)
    return [tensors[name] for name in names]


def check_matrix(tensor: Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int] | None, where: str) -> None:
    """Checks for a matrix of one of `dtypes`, and of `shape` if that is known."""
    fits = tensor.dtype in dtypes and tensor.ndim == 2 and 0 not in tensor.shape
    if fits and (shape is None or list(tensor.shape) == list(shape)):
        return
    kinds = " or ".join(_name(dtype) for dtype in dtypes)
    wanted = "a matrix" if shape is None else str(list(shape))
    raise ModelError(
        f"expected {kinds} {wanted}, found {_name(tensor.dtype)} {list(tensor.shape)}", where=where, fix=DAMAGED
    )


def read_shape(shape: Tensor, where: str) -> tuple[int, int]:
    """Rows and columns, as recorded in files of packed weights."""
    if shape.numel() != 2 or shape.is_floating_point() or bool((shape <= 0).any()):
        raise ModelError(f"expected rows and columns, found {shape.tolist()}", where=where, fix=DAMAGED)
    rows, columns = shape.view(-1).tolist()
    return int(rows), int(columns)


def check_groups(columns: int, group: int, where: str) -> None:
    if columns % group:
        raise ModelError(
            f"{columns} columns are not a multiple of the group of {group}", where=where, fix="use another checkpoint"
        )


def check_scale(scale: Tensor, where: str) -> None:
    """Every scale must be finite and not 0: any other value erases a group or spreads NaN.

    Negative scales are unusual but valid: some quantisers choose the sign that uses the code -8.
    """
    values = scale.float()
    bad = ~((values != 0) & values.isfinite())
    if not bool(bad.any()):
        return
    position = [int(index) for index in bad.nonzero()[0]]
    raise ModelError(
        f"the scale at {position} is {values[tuple(position)].item()}; scales must be finite and not 0 "
        f"({int(bad.sum())} are not)",
        where=where,
        fix=DAMAGED,
    )


def check_codes(codes: Tensor, where: str) -> None:
    """No E4M3 code may be NaN."""
    if bool((codes.view(torch.uint8) & 0x7F == 0x7F).any()):
        raise ModelError("a value is NaN", where=where, fix=DAMAGED)


def e4m3_values(codes: Tensor) -> Tensor:
    """E4M3 without NaN → BF16; every value is exact. On a CPU torch's own cast takes many times as long."""
    # Sign, exponent and mantissa, each at its place in BF16, are the value times 2^-120.
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(0x87F0 - 0x10000)
    return bits.view(torch.bfloat16).mul_(2.0**120)


def times_scales(values: Tensor, scales: Tensor) -> Tensor:
    """`bf16(float32(values) * scales)`: BF16 `[rows, K]` and fp32 `[rows, G]` → BF16 `[rows, K]`."""
    rows, groups = scales.shape
    return values.float().view(rows, groups, -1).mul_(scales.unsqueeze(-1)).to(torch.bfloat16).view(rows, -1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
