"""The kernels at sizes that train, on a CUDA device. `models/kernels` tests small shapes, with or without one."""

from __future__ import annotations

import pytest
import torch
from fakes.kernel_weights import CASES, adversarial, operands_of, ordinary, stack_on
from fakes.packed_weights import bits, generator
from torch import Tensor

from orbit_runtime.quant.formats import FORMATS, format_of
from orbit_runtime.quant.grouped import TorchGroupedProduct, grouped_linear
from orbit_runtime.quant.linear import FrozenLinear

pytestmark = pytest.mark.gpu
LAYOUTS = ["INT4", "INT4Asymmetric", "FP8", "FP8Block", "NVFP4", "NVFP4ModelOpt", "MXFP4"]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).bfloat16().cuda()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("case", CASES)
def test_a_large_weight_is_the_codecs_to_the_bit(case: str) -> None:
    from orbit_runtime.quant.kernels import launch

    weight = adversarial(case, 2100, 3840)
    found = launch.dequantize(operands_of(weight, "cuda"))[0].cpu()
    assert torch.equal(bits(found), bits(FORMATS[format_of(weight)].dequantize(weight)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", ["Fused", "Dequantize"])
@pytest.mark.parametrize("tokens", [1, 77, 2048, 5000])
def test_both_paths_equal_the_torch_path_at_training_sizes(
    layout: str, path: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = FrozenLinear(ordinary(layout, 2048, 4096)).cuda()
    x, dy = normal(tokens, 4096, seed=1).requires_grad_(), normal(tokens, 2048, seed=2)
    monkeypatch.setenv("ORBIT_KERNELS", path)
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    w = FORMATS[format_of(layer.packed)].dequantize(layer.packed, torch.float32)
    assert relative(y.detach(), x.detach().float() @ w.t()) < 3e-3
    assert relative(dx, dy.float() @ w) < 3e-3


@pytest.mark.parametrize("path", ["Fused", "Dequantize"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_experts_with_uneven_tokens(layout: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORBIT_KERNELS", path)
    stack, _ = stack_on([ordinary(layout, 512, 768, seed) for seed in range(24)], "cuda")
    counts = (torch.rand(24, generator=generator(3)).pow(3) * 300).long()
    offsets = counts.cumsum(0).to(torch.int32).cuda()
    x = normal(int(counts.sum()) + 5, 768, seed=1).requires_grad_()
    dy = normal(len(x), 512, seed=2)
    y = grouped_linear(x, stack, offsets)
    (dx,) = torch.autograd.grad(y, x, dy)
    reference, packed = TorchGroupedProduct(layout, 512, 768, None), tuple(stack.tensors.values())
    assert relative(y.detach(), reference.forward(x.detach().float(), offsets, packed)) < 3e-3
    assert relative(dx, reference.input_gradient(dy.float(), offsets, packed)) < 3e-3


def test_a_rows_result_does_not_depend_on_how_many_rows_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORBIT_KERNELS", "Fused")
    layer, x = FrozenLinear(ordinary("INT4", 1024, 2048)).cuda(), normal(3000, 2048, seed=1)
    whole = layer(x)
    for tokens in (1, 16, 100, 1000):
        assert torch.equal(layer(x[:tokens]), whole[:tokens]), tokens


@pytest.mark.parametrize("size", [32, 128])
def test_rows_of_many_slots_are_turned_as_by_run_and_a_graph_replays_it_for_other_rows(size: int) -> None:
    from orbit_runtime.adapters.oft import rotate
    from orbit_runtime.sglang_plugin.rotation_kernel import rotate_rows

    R = (torch.eye(size) + 0.2 * torch.randn(8, 4096 // size, size, size, generator=generator(1))).bfloat16().cuda()
    x, slots = normal(2048, 4096, seed=2), torch.full((2048,), -1, dtype=torch.int32, device="cuda")
    rotate_rows(x, R, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rotate_rows(x, R, slots)
    slots[:700], slots[700:701], slots[1500:] = 5, 2, 0
    graph.replay()
    for first, last, slot in ((0, 700, 5), (700, 701, 2), (1500, 2048, 0)):
        expected = rotate(x[first:last].float(), R[slot].float())
        assert relative(captured[first:last], expected) < 3e-3
    assert torch.equal(captured[701:1500], x[701:1500])
    assert torch.equal(captured, rotate_rows(x, R, slots))
