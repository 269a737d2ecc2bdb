"""The grouped product against one dense product per expert; what it saves; tokens that nobody has."""

from __future__ import annotations

import pytest
import torch
from fakes import packed_weights
from fakes.kernel_weights import stack_experts
from fakes.packed_weights import generator
from torch import Tensor

from orbit_runtime.quant import mxfp4
from orbit_runtime.quant.experts import ExpertStack, split_gpt_oss
from orbit_runtime.quant.formats import FORMATS, Weight, format_of
from orbit_runtime.quant.grouped import grouped_linear

N, K, E = 136, 64, 5
OFFSETS = torch.tensor([3, 3, 10, 11, 17])
"""Of 20 tokens: expert 1 has none, the last three belong to nobody."""
LAYOUTS = [layout for layout, codec in FORMATS.items() if codec.quantize is not None]


def experts(layout: str) -> list[Weight]:
    """Each with its own scales: the global ones differ, too."""
    arguments = (32,) if layout.startswith("INT4") else ()
    quantize = FORMATS[layout].quantize
    assert quantize is not None
    return [quantize(torch.randn(N, K, generator=generator(seed)) * 0.1 * (1 + seed), *arguments) for seed in range(E)]


def expected(x_TK: Tensor, weights: list[Weight]) -> Tensor:
    starts, rows = [0, *OFFSETS[:-1].tolist()], []
    for start, stop, weight in zip(starts, OFFSETS.tolist(), weights, strict=True):
        rows.append(x_TK[start:stop] @ FORMATS[format_of(weight)].dequantize(weight, x_TK.dtype).t())
    return torch.cat([*rows, x_TK.new_zeros(len(x_TK) - int(OFFSETS[-1]), N)])


def tokens() -> Tensor:
    return torch.randn(20, K, generator=generator(9), requires_grad=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("dense_bytes", [None, 1000])
def test_every_token_meets_its_expert_forward_and_backward(layout: str, stacked: bool, dense_bytes: int | None) -> None:
    weights, x, twin = experts(layout), tokens(), tokens()
    y = grouped_linear(x, stack_experts(weights) if stacked else weights, OFFSETS, dense_bytes=dense_bytes)
    reference = expected(twin, weights)
    torch.testing.assert_close(y, reference, rtol=1e-5, atol=1e-5)
    projection = torch.randn(20, N, generator=generator(10))
    torch.testing.assert_close(
        torch.autograd.grad(y, x, projection)[0],
        torch.autograd.grad(reference, twin, projection)[0],
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("stacked", [True, False])
def test_only_packed_tensors_and_offsets_are_saved(stacked: bool) -> None:
    weights, saved = experts("NVFP4"), []
    stack = stack_experts(weights)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        grouped_linear(tokens(), stack if stacked else weights, OFFSETS)
    allowed = sum(FORMATS["NVFP4"].num_bytes(weight) for weight in weights) + OFFSETS.nbytes
    assert sum(tensor.nbytes for tensor in saved) == allowed


def test_a_gradient_check_passes_in_fp64() -> None:
    stack = stack_experts(experts("INT4"))
    x = tokens().detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: grouped_linear(x, stack, OFFSETS).square().mean(-1), (x,))


def test_no_tokens_at_all_give_zeros() -> None:
    x = tokens()
    y = grouped_linear(x, stack_experts(experts("MXFP4")), torch.zeros(E, dtype=torch.int32))
    assert y.shape == (20, N)
    assert not y.any()
    assert not torch.autograd.grad(y.sum(), x)[0].any()


def test_one_expert_of_a_stack_shares_its_memory() -> None:
    weights = experts("FP8BlockCT")
    stack = stack_experts(weights)
    assert (stack.num_experts, stack.shape) == (E, (N, K))
    assert torch.equal(FORMATS["FP8BlockCT"].dequantize(stack.expert(3)), FORMATS["FP8BlockCT"].dequantize(weights[3]))
    assert stack.expert(3).qdata.untyped_storage().data_ptr() == stack.tensors["weight"].untyped_storage().data_ptr()


def test_gpt_oss_tensors_are_a_stack_without_a_copy() -> None:
    blocks, scales = packed_weights.random_bytes(3, 8, 2, 16, seed=1), torch.full((3, 8, 2), 120, dtype=torch.uint8)
    whole = FORMATS["MXFP4GptOss"].from_checkpoint({"m_blocks": blocks, "m_scales": scales}, "m")
    stack: ExpertStack = split_gpt_oss(whole)
    assert (stack.num_experts, stack.shape) == (3, (8, 64))
    assert stack.tensors["blocks"].data_ptr() == blocks.data_ptr()
    for index in range(3):
        assert torch.equal(mxfp4.dequantize(stack.expert(index)), mxfp4.dequantize(mxfp4.expert(whole, index)))
