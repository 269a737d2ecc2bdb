"""Files of tensors that were widened from BF16, and of those that were not."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from orbit_runtime.adapters.tensorfile import dump_narrowed, narrowed

EXACT = {"b": torch.tensor([[1.0, -0.0], [0.5, 2.0**-130]]), "a": torch.tensor([3.0])}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_bf16_holds_is_written_as_bf16_however_wide_it_came(dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in EXACT.items()}
    found = narrowed(tensors)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert dump_narrowed(found) == dump_narrowed(tensors)
    read = load(dump_narrowed(tensors))
    assert all(same_bits(read[name], tensor.bfloat16()) for name, tensor in EXACT.items())


@pytest.mark.parametrize("bits", [0x3F808000, 0x00000001, 0x7FC00001], ids=["between", "subnormal", "a NaN's"])
def test_one_value_that_bf16_cannot_hold_keeps_every_bit_of_all(bits: int) -> None:
    tensors = {**EXACT, "c": torch.tensor([bits], dtype=torch.int32).view(torch.float32)}
    assert narrowed(tensors) is tensors
    read = load(dump_narrowed(tensors))
    assert all(same_bits(read[name], tensor) for name, tensor in tensors.items())


def test_no_tensors_are_a_file_too() -> None:
    assert load(dump_narrowed(narrowed({}))) == {}


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))
