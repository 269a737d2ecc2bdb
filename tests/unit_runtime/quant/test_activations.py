"""Rounded activations against compressed-tensors' fake quantisation; the straight-through gradient; static scales."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp, generate_gparam
from fakes.kernel_weights import ordinary, stack_on
from fakes.packed_weights import generator
from torch import Tensor

from orbit_runtime.quant.activations import Rounding, build_rounding, scale_name
from orbit_runtime.quant.formats import FORMATS
from orbit_runtime.quant.grouped import grouped_linear
from orbit_runtime.quant.linear import FrozenLinear, share_rows

FP8_TOKEN = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
FP8_GROUP = QuantizationArgs(num_bits=8, type="float", strategy="group", group_size=128, dynamic=True)
FP8_TENSOR = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
NVFP4 = QuantizationArgs(
    num_bits=4, type="float", strategy="tensor_group", group_size=16, dynamic="local", scale_dtype=torch.float8_e4m3fn
)
T, K = 7, 256
STATIC = {"FP8": torch.tensor([9.7]), "NVFP4": torch.tensor([0.5]), "NVFP4ModelOpt": torch.tensor(2.0)}
"""For a largest value of 4,000. The two of NVFP4 are each other's exact reciprocals."""
CASES = [
    ("FP8", "FP8", False), ("FP8", "FP8", True), ("FP8", "FP8Block", False), ("FP8", "FP8BlockCT", False),
    ("NVFP4", "NVFP4", False), ("NVFP4", "NVFP4", True), ("NVFP4", "NVFP4ModelOpt", True),
]  # fmt: skip


def inputs() -> Tensor:
    """Tokens of very different size; whole blocks of zeros, and one token of zeros."""
    x = torch.randn(T, K, generator=generator(1)) * torch.tensor([1.0, 300.0, 1e-3, 0.0, 1.0, 20.0, 1e-20]).unsqueeze(1)
    x[0, :128] = 0.0
    x[4, 16:64] = 0.0
    x[5, 3] = 4000.0
    return x


def vendors(x: Tensor, layout: str, static: bool) -> Tensor:
    """compressed-tensors' value of every element."""
    if layout == "FP8" and not static:
        scale, zero = compute_dynamic_scales_and_zp(x.unsqueeze(0), FP8_TOKEN, torch.nn.Module())
        return fake_quantize(x.unsqueeze(0), scale, zero, FP8_TOKEN)[0]
    if layout == "FP8":
        return fake_quantize(x, STATIC["FP8"], torch.zeros(1), FP8_TENSOR)
    if layout.startswith("FP8Block"):
        scale, zero = compute_dynamic_scales_and_zp(x, FP8_GROUP, torch.nn.Module())
        return fake_quantize(x, scale, zero, FP8_GROUP)
    rows = []
    for row in x.split(1):
        # Without a static scale each token has its own, as a tensor of its own would have.
        whole = STATIC["NVFP4"] if static else generate_gparam(row.amin(), row.amax())
        scale, zero = compute_dynamic_scales_and_zp(row, NVFP4, torch.nn.Module(), whole)
        rows.append(fake_quantize(row, scale, zero, NVFP4, global_scale=whole))
    return torch.cat(rows)


def assert_product(found: Tensor, rounded: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """`rounded @ w.T + bias`, but for the rounding of fp32 sums."""
    expected = rounded.double() @ w.double().t() + (0.0 if bias is None else bias.double())
    bound = 1e-5 * (rounded.double().abs() @ w.double().abs().t()) + 1e-6
    assert bool(((found.double() - expected).abs() <= bound).all())


def rounding_of(precision: str, layout: str, static: bool) -> tuple[Rounding, Tensor | None]:
    rounding = build_rounding(precision, layout, static)  # type: ignore[arg-type]
    assert rounding is not None
    return rounding, STATIC[layout] if static else None


@pytest.mark.parametrize(("precision", "layout", "static"), CASES)
def test_every_value_is_that_of_compressed_tensors(precision: str, layout: str, static: bool) -> None:
    rounding, scale = rounding_of(precision, layout, static)
    x = inputs()
    values, factor = rounding(x, scale)
    found = values if factor is None else values * factor
    expected = vendors(x, layout, static)
    # The codes are equal; the product of code and scales is put together in another order.
    torch.testing.assert_close(found, expected, rtol=3e-7, atol=1e-38)
    changed = (expected - x).norm() / x.norm()
    assert 0.005 < changed < 0.2, "the vendor's rounding is one"


@pytest.mark.parametrize(("precision", "layout", "static"), CASES)
def test_values_are_exact_in_bf16_where_a_factor_is_kept_apart(precision: str, layout: str, static: bool) -> None:
    rounding, scale = rounding_of(precision, layout, static)
    x = inputs().bfloat16()
    values, factor = rounding(x, scale)
    wide, wide_factor = rounding(x.float(), scale)
    assert values.dtype is torch.bfloat16
    if factor is None:
        assert layout.startswith("FP8Block")
        torch.testing.assert_close(values.float(), wide, rtol=2**-8, atol=0)
    else:
        assert torch.equal(values.float(), wide)
        assert torch.equal(factor, wide_factor)


@pytest.mark.parametrize(("precision", "layout", "static"), CASES)
@pytest.mark.parametrize("biased", [True, False])
def test_the_linear_multiplies_rounded_values_and_the_gradient_passes_straight_through(
    precision: str, layout: str, static: bool, biased: bool
) -> None:
    weight, (rounding, scale) = ordinary(layout, 48, K), rounding_of(precision, layout, static)
    bias = torch.linspace(-1, 1, 48).bfloat16() if biased else None
    layer, saved = FrozenLinear(weight, bias, rounding=rounding, input_scale=scale), []
    x = inputs().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = layer(x)
    w, rounded = FORMATS[layout].dequantize(weight, torch.float32), vendors(x.detach(), layout, static)
    assert_product(y.detach(), rounded, w, bias)
    dy = torch.randn(T, 48, generator=generator(2))
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], dy @ w, rtol=1e-5, atol=1e-5)
    packed = {buffer.data_ptr() for buffer in layer.buffers()}
    assert all(tensor.data_ptr() in packed or tensor.dtype is torch.int32 for tensor in saved)
    with torch.no_grad():
        assert_product(layer.product(x, torch.empty(48 * K)), rounded, w, bias)
        assert_product(layer(x), rounded, w, bias)


def test_weight_only_and_other_formats_leave_x_alone() -> None:
    for layout in FORMATS:
        assert build_rounding("WeightOnly", layout, False) is None
        wanted = {"FP8": "FP8", "NVFP4": "NVFP4"}.get(FORMATS[layout].precision)
        for precision in ("FP8", "NVFP4"):
            assert (build_rounding(precision, layout, False) is not None) == (precision == wanted)  # type: ignore[arg-type]


def test_static_scales_have_the_names_of_the_layouts_vendor() -> None:
    assert scale_name("NVFP4", "NVFP4") == "input_global_scale"
    assert scale_name("NVFP4", "NVFP4ModelOpt") == scale_name("FP8", "FP8") == "input_scale"


def test_experts_inputs_are_rounded_too() -> None:
    stack, _ = stack_on([ordinary("NVFP4", 48, K, seed) for seed in range(2)], "cpu")
    rounding, _ = rounding_of("NVFP4", "NVFP4", False)
    x, offsets = inputs().requires_grad_(), torch.tensor([3, T])
    y = grouped_linear(x, stack, offsets, rounding=rounding)
    dense = [FORMATS["NVFP4"].dequantize(stack.expert(index), torch.float32) for index in range(2)]
    rounded = vendors(x.detach(), "NVFP4", False)
    assert_product(y[:3].detach(), rounded[:3], dense[0])
    assert_product(y[3:].detach(), rounded[3:], dense[1])
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx[3:], dense[1].sum(0).expand(4, -1), rtol=1e-5, atol=1e-5)


def test_linears_that_share_rows_must_round_alike() -> None:
    token, none = Rounding("FP8Token"), None
    weights = [ordinary("INT4", 32, 64, seed) for seed in range(2)]
    alike = [FrozenLinear(weight, rounding=token) for weight in weights]
    whole = share_rows(alike)
    assert whole is not None
    assert whole.rounding == token
    assert share_rows([FrozenLinear(weights[0], rounding=token), FrozenLinear(weights[1], rounding=none)]) is None
    static = [
        FrozenLinear(weight, rounding=Rounding("FP8Static"), input_scale=torch.tensor(scale))
        for weight, scale in zip(weights, (0.1, 0.2), strict=True)
    ]
    assert share_rows(static) is None
