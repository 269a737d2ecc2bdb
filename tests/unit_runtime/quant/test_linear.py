"""The frozen linear layer against a dense layer with the same values; what it saves; what it leaves alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from orbit_runtime.quant import bf16, int4
from orbit_runtime.quant.formats import FORMATS, format_of
from orbit_runtime.quant.linear import FrozenLinear, share_rows


def frozen(kind: str, bias: bool = False, dense_bytes: int | None = None) -> FrozenLinear:
    w = torch.randn(48, 64, generator=torch.Generator().manual_seed(2)) * 0.1
    weight = int4.quantize(w, 32) if kind == "INT4" else bf16.quantize(w)
    return FrozenLinear(weight, torch.linspace(-1, 1, 48).bfloat16() if bias else None, dense_bytes=dense_bytes)


def dense(layer: FrozenLinear) -> Tensor:
    weight = layer.packed
    return FORMATS[format_of(weight)].dequantize(weight, torch.float32)


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), requires_grad=True)


@pytest.mark.parametrize("kind", ["BF16", "INT4"])
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradient_equal_those_of_a_dense_layer(kind: str, shape: tuple[int, ...], bias: bool) -> None:
    layer, x = frozen(kind, bias=bias), inputs(*shape)
    twin = x.detach().clone().requires_grad_()
    y, expected = layer(x), nn.functional.linear(twin, dense(layer), layer.bias.float() if bias else None)
    weights = torch.arange(48.0)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.grad, twin.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["BF16", "INT4"])
@pytest.mark.parametrize("limit", [1, 64 * 4 * 7, 64 * 4 * 47])
@pytest.mark.parametrize("sequence", [3, 40], ids=["few rows", "rows enough to multiply transposed"])
def test_going_by_runs_of_rows_changes_nothing_but_rounding(kind: str, limit: int, sequence: int) -> None:
    x, again = inputs(2, sequence, 64), inputs(2, sequence, 64)
    whole = frozen(kind, bias=True)(x)
    whole.square().sum().backward()
    by_rows = frozen(kind, bias=True, dense_bytes=limit)(again)
    by_rows.square().sum().backward()
    torch.testing.assert_close(by_rows, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(again.grad, x.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("limit", [8 << 20, 1024])
def test_only_packed_tensors_are_saved_for_the_backward_pass(limit: int) -> None:
    layer, saved = frozen("INT4", dense_bytes=limit), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        layer(inputs(100, 64))
    assert {tensor.data_ptr() for tensor in saved} == {layer.weight_packed.data_ptr(), layer.weight_scale.data_ptr()}
    assert sum(tensor.nbytes for tensor in saved) == 48 * 64 * 0.5625


def test_the_same_values_with_and_without_a_graph() -> None:
    layer, x = frozen("INT4"), inputs(4, 64)
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x.detach()))
        without = layer(x)
    assert torch.equal(layer(x), without)
    assert not layer(x.detach()).requires_grad


def test_it_computes_in_the_dtype_of_its_input() -> None:
    layer, x = frozen("INT4", bias=True), inputs(4, 64).detach().bfloat16().requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(y.float(), layer(x.float()), rtol=2e-2, atol=2e-2)


def test_no_parameter_and_no_gradient_for_the_base() -> None:
    layer = frozen("INT4", bias=True)
    layer(inputs(4, 64)).sum().backward()
    assert list(layer.parameters()) == []
    assert all(buffer.grad is None for buffer in layer.buffers())


@pytest.mark.parametrize("kind", ["BF16", "INT4"])
def test_casting_a_model_leaves_packed_tensors_alone(kind: str) -> None:
    layer = frozen(kind)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    nn.Sequential(layer).to(torch.float64).half()
    for name, buffer in layer.named_buffers():
        assert buffer.dtype == before[name].dtype
        assert torch.equal(buffer, before[name])


def test_a_replaced_buffer_is_the_one_that_multiplies() -> None:
    layer, x = frozen("INT4"), inputs(4, 64).detach()
    before = layer(x)
    layer.load_state_dict({**layer.state_dict(), "weight_scale": -layer.weight_scale}, assign=True)
    assert torch.equal(layer(x), -before)
    torch.testing.assert_close(copy.deepcopy(layer)(x), -before)


PACKED = [name for name, codec in FORMATS.items() if codec.quantize and name != "BF16"]


def packed(name: str, seed: int, **options: int) -> FrozenLinear:
    w = torch.randn(48, 64, generator=torch.Generator().manual_seed(seed)) * 0.1
    codec = FORMATS[name]
    assert codec.quantize
    return FrozenLinear(codec.quantize(w, 32) if codec.precision == "INT4" else codec.quantize(w), **options)


def gradient(layer: FrozenLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(y)
    return y, x.grad


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [8 << 20, 64 * 4 * 7], ids=["whole", "in runs"])
def test_a_dense_copy_gives_the_same_bits(name: str, dtype: torch.dtype, limit: int) -> None:
    layer, other = packed(name, 2, dense_bytes=limit), packed(name, 2, dense_bytes=limit)
    layer.widen(Tensor.float, dtype)
    for rows in (1, 40, 300):
        x, buffer = inputs(rows, 64).to(dtype), torch.empty(48 * 64, dtype=dtype)
        assert all(map(torch.equal, gradient(layer, x), gradient(other, x)))
        assert torch.equal(layer.product(x.detach(), buffer), other.product(x.detach(), buffer))
    assert list(layer.state_dict()) == list(other.state_dict())


def test_a_dense_copy_is_shared_with_neighbours_and_given_up_with_its_packed_tensors() -> None:
    members, x = [packed("INT4", seed) for seed in (2, 3)], inputs(4, 64).detach()
    before = torch.cat([each(x) for each in members], -1)
    for each in members:
        each.widen(Tensor.float, torch.float32)
    whole = share_rows(members)
    assert whole
    assert torch.equal(torch.cat([each(x) for each in members], -1), before)
    (dense,), parts = whole.views(), [each.views()[0] for each in members]
    assert [part.data_ptr() for part in parts] == [dense.data_ptr(), dense[48:].data_ptr()]
    assert whole.changed_copy() is None
    dense[50, 3] *= 2
    assert whole.changed_copy() is dense
    first, second = members
    assert (first.changed_copy(), second.changed_copy()) == (None, parts[1])
    first.weight_scale = -first.weight_scale
    assert torch.equal(first(x), -before[:, :48])


def test_buffers_are_named_as_in_the_checkpoint() -> None:
    assert list(frozen("INT4", bias=True).state_dict()) == ["weight_packed", "weight_scale", "bias"]
    assert list(frozen("BF16").state_dict()) == ["weight"]


def test_gradients_flow_through_checkpointed_regions() -> None:
    layer, x, again = frozen("INT4"), inputs(4, 64), inputs(4, 64)
    layer(x).square().sum().backward()
    torch.utils.checkpoint.checkpoint(layer, again, use_reentrant=False).square().sum().backward()
    assert torch.equal(x.grad, again.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["BF16", "INT4"])
@pytest.mark.parametrize("limit", [256 << 20, 64 * 4 * 7])
def test_on_cuda_the_weight_has_the_same_bits(kind: str, limit: int) -> None:
    layer = frozen(kind, bias=True, dense_bytes=limit)
    expected = dense(layer)
    layer.to("cuda")
    assert torch.equal(dense(layer).cpu().view(torch.int32), expected.view(torch.int32))
    x = inputs(6, 64).detach().cuda().bfloat16().requires_grad_()
    y = layer(x)
    y.sum().backward()
    torch.testing.assert_close(y.float().cpu(), layer.to("cpu")(x.detach().cpu().float()), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(x.grad[0].float().cpu(), expected.sum(0), rtol=2e-2, atol=2e-2)
