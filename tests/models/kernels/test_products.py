"""Fused products against fp64 products with the codec's values; tails, biases, offsets, and what autograd keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fakes.kernel_weights import operands_of, ordinary, stack_on
from fakes.packed_weights import generator
from torch import Tensor

from orbit_runtime.quant.formats import FORMATS, Weight, format_of
from orbit_runtime.quant.grouped import TorchGroupedProduct, _GroupedMatmul, grouped_linear
from orbit_runtime.quant.kernels import launch
from orbit_runtime.quant.kernels.launch import FORWARD_TILES, GRADIENT_TILES, Tiles
from orbit_runtime.quant.kernels.products import (
    DequantizedGroupedProduct,
    DequantizedProduct,
    FusedGroupedProduct,
    FusedProduct,
)
from orbit_runtime.quant.linear import FrozenLinear, _FrozenMatmul

LAYOUTS = ["INT4", "INT4Asymmetric", "FP8", "FP8Block", "NVFP4", "NVFP4ModelOpt", "MXFP4"]
SMALL = Tiles(16, 32, 64)
OFFSETS = torch.tensor([5, 5, 40, 41, 61], dtype=torch.int32)
"""Of 64 tokens: expert 1 has none, expert 2 more than a tile, the last three belong to nobody."""


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).bfloat16()


def dense(weight: Weight) -> Tensor:
    return FORMATS[format_of(weight)].dequantize(weight, torch.float64)


def assert_rounded_once(found: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> None:
    """Each value is the exact product, off by no more than half a BF16 step and the rounding of an fp32 sum."""
    exact = left.double() @ right + (0 if bias is None else bias.double())
    magnitudes = left.double().abs() @ right.abs() + exact.abs()
    bound = exact.abs() * 2.0**-8 + magnitudes * left.shape[-1] * 2.0**-24
    assert found.dtype is torch.bfloat16
    excess = (found.cpu().double() - exact).abs() - bound
    assert bool((excess <= 0).all()), f"{int((excess > 0).sum())} of {excess.numel()} values, worst by {excess.max()}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(19, 40, 128), (1, 72, 96)])
def test_forward_and_gradient_are_the_codecs_products(
    layout: str, tokens: int, rows: int, columns: int, device: str
) -> None:
    weight = ordinary(layout, rows, columns)
    operands, w = operands_of(weight, device), dense(weight)
    x, dy = normal(tokens, columns, seed=1), normal(tokens, rows, seed=2)
    bias = normal(rows, seed=3)
    assert_rounded_once(launch.forward(x.to(device), operands, tiles=SMALL), x, w.t())
    assert_rounded_once(launch.forward(x.to(device), operands, bias=bias.to(device), tiles=SMALL), x, w.t(), bias)
    assert_rounded_once(launch.input_gradient(dy.to(device), operands, tiles=SMALL), dy, w)


@pytest.mark.parametrize("layout", ["INT4", "FP8Block", "NVFP4"])
@pytest.mark.parametrize("tiles", FORWARD_TILES, ids=str)
def test_the_tiles_that_devices_choose_from_give_the_same_product(layout: str, tiles: Tiles, device: str) -> None:
    weight = ordinary(layout, 136, 224)
    x = normal(70, 224, seed=1)
    assert_rounded_once(launch.forward(x.to(device), operands_of(weight, device), tiles=tiles), x, dense(weight).t())


@pytest.mark.parametrize("layout", ["INT4", "FP8Block", "NVFP4"])
@pytest.mark.parametrize("tiles", GRADIENT_TILES, ids=str)
def test_the_tiles_that_devices_choose_from_give_the_same_gradient(layout: str, tiles: Tiles, device: str) -> None:
    weight = ordinary(layout, 136, 224)
    dy = normal(70, 136, seed=1)
    assert_rounded_once(
        launch.input_gradient(dy.to(device), operands_of(weight, device), tiles=tiles), dy, dense(weight)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_meets_its_expert(layout: str, device: str) -> None:
    weights = [ordinary(layout, 72, 96, seed) for seed in range(len(OFFSETS))]
    _, operands = stack_on(weights, device)
    x, dy = normal(64, 96, seed=1), normal(64, 72, seed=2)
    y = launch.forward(x.to(device), operands, offsets_E=OFFSETS.to(device), tiles=SMALL).cpu()
    dx = launch.input_gradient(dy.to(device), operands, offsets_E=OFFSETS.to(device), tiles=SMALL).cpu()
    start = 0
    for weight, stop in zip(weights, OFFSETS.tolist(), strict=True):
        assert_rounded_once(y[start:stop], x[start:stop], dense(weight).t())
        assert_rounded_once(dx[start:stop], dy[start:stop], dense(weight))
        start = stop
    assert not y[start:].any()
    assert not dx[start:].any()


def test_no_tokens_launch_nothing(device: str) -> None:
    operands = operands_of(ordinary("INT4", 32, 64), device)
    assert launch.forward(torch.empty(0, 64, dtype=torch.bfloat16, device=device), operands).shape == (0, 32)


@pytest.mark.parametrize("make", [FusedProduct, lambda form: DequantizedProduct(form, 2 * 96 * 128)])
@pytest.mark.usefixtures("library")
def test_as_the_frozen_linears_product_it_agrees_with_the_torch_path_and_keeps_packed_bytes(
    make: Callable[..., FusedProduct], device: str
) -> None:
    weight, bias = ordinary("INT4", 200, 96), normal(200, seed=7).to(device)
    layer, operands, saved = FrozenLinear(weight, bias).to(device), operands_of(weight, device), []
    x = normal(3, 5, 96, seed=1).to(device).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = _FrozenMatmul.apply(x, bias, make(operands.form), *operands.tensors)
    dy = normal(3, 5, 200, seed=2).to(device)
    assert {tensor.data_ptr() for tensor in saved} == {tensor.data_ptr() for tensor in operands.tensors}
    assert_rounded_once(y.detach().flatten(0, 1), x.detach().cpu().flatten(0, 1), dense(weight).t(), bias.cpu())
    (dx,) = torch.autograd.grad(y, x, dy)
    twin = x.detach().float().requires_grad_()
    (expected,) = torch.autograd.grad(layer._product.forward(twin, None, layer._packed_views()), twin, dy.float())
    torch.testing.assert_close(dx.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dense_bytes", [1 << 30, 1])
def test_experts_that_are_dense_first_agree_with_the_torch_path(dense_bytes: int, device: str) -> None:
    """Whole, and by runs of 128 rows; 5 tokens behind the last offset are nobody's."""
    stack, operands = stack_on([ordinary("INT4", 200, 96, seed) for seed in range(len(OFFSETS))], device)
    product, offsets = DequantizedGroupedProduct(operands.form, dense_bytes), OFFSETS.to(device)
    x, dy = normal(int(OFFSETS[-1]) + 5, 96, seed=1).to(device), normal(int(OFFSETS[-1]) + 5, 200, seed=2).to(device)
    reference, packed = TorchGroupedProduct("INT4", 200, 96, None), tuple(stack.tensors.values())
    y, dx = product.forward(x, offsets, operands.tensors), product.input_gradient(dy, offsets, operands.tensors)
    torch.testing.assert_close(y.float(), reference.forward(x.float(), offsets, packed), rtol=2e-2, atol=2e-2)
    # Each run's product is BF16 before it is added: as many roundings of numbers around 10 as there are runs.
    torch.testing.assert_close(dx.float(), reference.input_gradient(dy.float(), offsets, packed), rtol=2e-2, atol=6e-2)
    assert not y[-5:].any()
    assert not dx[-5:].any()


def test_as_the_grouped_product_it_agrees_with_the_torch_path_and_keeps_packed_bytes(device: str) -> None:
    stack, operands = stack_on([ordinary("NVFP4", 72, 96, seed) for seed in range(len(OFFSETS))], device)
    offsets, saved = OFFSETS.to(device), []
    x = normal(64, 96, seed=1).to(device).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = _GroupedMatmul.apply(x, offsets, FusedGroupedProduct(operands.form), False, *operands.tensors)
    assert {tensor.data_ptr() for tensor in saved} == {tensor.data_ptr() for tensor in (offsets, *operands.tensors)}
    twin = x.detach().float().requires_grad_()
    reference = TorchGroupedProduct("NVFP4", 72, 96, None)
    expected = _GroupedMatmul.apply(twin, offsets, reference, False, *stack.tensors.values())
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)
    dy = normal(64, 72, seed=2).to(device)
    torch.testing.assert_close(
        torch.autograd.grad(y, x, dy)[0].float(),
        torch.autograd.grad(expected, twin, dy.float())[0],
        rtol=2e-2,
        atol=2e-2,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["Fused", "Dequantize"])
def test_on_a_device_the_frozen_linear_takes_the_kernel(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORBIT_KERNELS", path)
    layer = FrozenLinear(ordinary("INT4", 256, 512)).to("cuda")
    product, _ = layer._chosen_product(normal(300, 512, seed=1).cuda())
    assert isinstance(product, FusedProduct if path == "Fused" else DequantizedProduct)


@pytest.mark.gpu
def test_on_a_device_experts_take_the_kernel() -> None:
    stack, _ = stack_on([ordinary("MXFP4", 72, 96, seed) for seed in range(len(OFFSETS))], "cuda")
    x = normal(64, 96, seed=1).cuda()
    y = grouped_linear(x, stack, OFFSETS.cuda())
    expected = TorchGroupedProduct("MXFP4", 72, 96, None).forward(
        x.float(), OFFSETS.cuda(), tuple(stack.tensors.values())
    )
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)
