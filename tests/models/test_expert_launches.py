"""Experts at training speed: as many operations for many experts as for few, and none whose result the host reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.expert_layer import AdaptedExpertLinear, multiply_by_expert, rotate_by_expert
from orbit_runtime.adapters.layer import TRAINER_SLOT, Selection
from orbit_runtime.adapters.lora import LoRASlot
from orbit_runtime.adapters.oft import OFTSlot, rotate
from orbit_runtime.policy.experts import FrozenExperts, gated
from orbit_runtime.quant.expert_linear import FrozenExpertLinear, build_dispatch, build_held_dispatch
from orbit_runtime.quant.experts import ExpertStack
from orbit_runtime.quant.grouped import StackedGroupedProduct, TorchGroupedProduct, grouped_linear
from tests.models.test_recompute import Operations

HIDDEN, INNER, RANK, BLOCK, TOKENS, CHOICES = 32, 16, 8, 8, 24, 3
OPERATIONS = {"LoRA": (71, 99), "OFT": (104, 99)}
"""Forward, backward, of one layer of gate, up and down with an adapter for each expert, whatever their number.

While experts were looped over it was, with 4, 16 and 42 of them that had tokens: LoRA (178, 286), (538, 970) and
(1318, 2848), OFT (187, 223), (616, 760) and (1483, 2059).
"""


def by_loop(x_SK: Tensor, values_E: Tensor, offsets_E: Tensor, maths: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    counts = torch.diff(offsets_E, prepend=offsets_E.new_zeros(1)).tolist()
    return torch.cat([maths(x, value) for x, value in zip(x_SK.split(counts), values_E, strict=True) if len(x)])


def build_layer(experts: int, adapter: str) -> tuple[FrozenExperts, list[Tensor]]:
    """BF16 weights, and an adapter for each expert on every projection."""
    config = AdapterConfig(adapter, ("gate_proj",), rank=RANK, block_size=BLOCK, experts="PerExpert")  # type: ignore[arg-type]
    selection = Selection(compute_dtype=torch.bfloat16, active=TRAINER_SLOT)
    layers, trained = {}, []
    for name, (out, into) in {
        "gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER),
    }.items():  # fmt: skip
        weight = torch.randn(experts, out, into).bfloat16()
        base = FrozenExpertLinear(ExpertStack("BF16", {"weight": weight}), reads_tokens=name != "down_proj")
        layer = AdaptedExpertLinear(base, name, config, selection)
        made = [torch.randn(shape).mul(0.1).bfloat16().requires_grad_() for shape in slot_shapes(layer)]
        selection.live.setdefault(TRAINER_SLOT, {})[name] = (
            LoRASlot(made[0], made[1], 2.0) if adapter == "LoRA" else OFTSlot(made[0])
        )
        layers[name] = layer
        trained += made
    return FrozenExperts(layers, gated(torch.nn.functional.silu)), trained  # type: ignore[arg-type]


def slot_shapes(layer: AdaptedExpertLinear) -> list[tuple[int, ...]]:
    if layer.config.type == "LoRA":
        return list(layer.shapes().values())
    return [(layer.num_experts, layer.in_features // BLOCK, BLOCK, BLOCK)]


def route(experts: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(1))
    weights, chosen = scores.topk(CHOICES)
    return chosen, weights


@pytest.mark.parametrize("adapter", OPERATIONS)
@pytest.mark.usefixtures("library")
def test_a_layer_takes_as_many_operations_for_many_experts_as_for_few(adapter: str) -> None:
    found = []
    for experts in (4, 16, 64):
        layer, trained = build_layer(experts, adapter)
        hidden = torch.randn(TOKENS, HIDDEN).bfloat16().requires_grad_()
        chosen, weights = route(experts)
        weights.requires_grad_()
        with Operations() as forward:
            result = layer(hidden, chosen, weights)
        with Operations() as backward:
            result.backward(torch.ones_like(result))
        assert all(each.grad is not None and bool(each.grad.any()) for each in (*trained, hidden, weights))
        found.append((forward.counts.total(), backward.counts.total()))
    assert len(set(found)) == 1, found
    assert all(count <= most for count, most in zip(found[0], OPERATIONS[adapter], strict=True)), found


@pytest.mark.parametrize("adapter", OPERATIONS)
@pytest.mark.usefixtures("library")
def test_the_host_reads_nothing(adapter: str) -> None:
    """A tensor without values cannot be read: whatever asks for one raises."""
    with FakeTensorMode(), torch.device("cpu"):
        layer, _ = build_layer(16, adapter)
        chosen = torch.empty(TOKENS, CHOICES, dtype=torch.long)
        weights = torch.empty(TOKENS, CHOICES, requires_grad=True)
        hidden = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        layer(hidden, chosen, weights).sum().backward()
        assert hidden.grad is not None
        with pytest.raises(RuntimeError):
            chosen.flatten().bincount().tolist()


def test_slots_stand_as_counting_says() -> None:
    chosen, weights = route(9, 40)
    chosen = torch.where(chosen == 4, 5, chosen)
    dispatch = build_dispatch(chosen, 9)
    counts = torch.bincount(chosen.flatten(), minlength=9)
    assert dispatch.offsets_E.tolist() == counts.cumsum(0).tolist()
    assert torch.equal(chosen.flatten()[dispatch.order_S], dispatch.expert_S)
    assert torch.equal(dispatch.order_S[dispatch.slot_of_TC.flatten()], torch.arange(chosen.numel()))
    y = torch.randn(chosen.numel(), 7, requires_grad=True)
    weights.requires_grad_()
    slope = torch.randn(40, 7)
    found = dispatch.combine(y, weights)
    expected = torch.stack([(y[dispatch.slot_of_TC[t]] * weights[t][:, None]).sum(0) for t in range(40)])
    torch.testing.assert_close(found, expected)
    for mine, other in zip(
        torch.autograd.grad(found, (y, weights), slope), torch.autograd.grad(expected, (y, weights), slope), strict=True
    ):
        torch.testing.assert_close(mine, other)


def test_experts_that_are_held_in_two_places_add_up_to_all() -> None:
    chosen, weights = route(9, 40)
    x = torch.randn(40, 7, requires_grad=True)
    scale = torch.randn(9, requires_grad=True)
    weights.requires_grad_()
    slope = torch.randn(40, 7)

    def result(held: range) -> Tensor:
        dispatch = build_held_dispatch(chosen, held) if len(held) < 9 else build_dispatch(chosen, 9)
        y_SN = dispatch.gather(x) * scale[held.start : held.stop][dispatch.expert_S].unsqueeze(1)
        return dispatch.combine(y_SN, weights)

    whole, parts = result(range(9)), result(range(4)) + result(range(4, 9))
    torch.testing.assert_close(parts, whole)
    for mine, other in zip(
        torch.autograd.grad(parts, (x, scale, weights), slope),
        torch.autograd.grad(whole, (x, scale, weights), slope),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("rank", [1, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("library")
def test_one_product_for_all_experts_is_the_loops(rank: int, dtype: torch.dtype) -> None:
    """An expert without slots among them; of a rank below 16 bytes the product sees zeros beside."""
    offsets = torch.tensor([5, 5, 21, 40], dtype=torch.int32)
    x = torch.randn(40, 24).to(dtype).requires_grad_()
    w = torch.randn(4, rank, 24).to(dtype).requires_grad_()
    found = multiply_by_expert(x, w.transpose(1, 2), offsets)
    expected = by_loop(x, w, offsets, lambda part, value: part @ value.t())
    slope = torch.randn(40, rank).to(dtype)
    pairs = zip(
        (found, *torch.autograd.grad(found, (x, w), slope)),
        (expected, *torch.autograd.grad(expected, (x, w), slope)),
        strict=True,
    )
    for mine, other in pairs:
        assert mine.dtype is dtype
        if rank == 8:
            assert torch.equal(mine, other)
        torch.testing.assert_close(mine, other)


def test_every_experts_blocks_turn_in_one_product() -> None:
    offsets = torch.tensor([5, 5, 21, 40], dtype=torch.int32)
    x, R = torch.randn(40, 24, requires_grad=True), torch.randn(4, 3, 8, 8, requires_grad=True)
    found, expected = rotate_by_expert(x, R, offsets), by_loop(x, R, offsets, rotate)
    slope = torch.randn(40, 24)
    torch.testing.assert_close(found, expected)
    for mine, other in zip(
        torch.autograd.grad(found, (x, R), slope), torch.autograd.grad(expected, (x, R), slope), strict=True
    ):
        torch.testing.assert_close(mine, other)


def test_bf16_experts_go_through_one_product_and_tokens_of_nobody_give_nothing() -> None:
    stack = ExpertStack("BF16", {"weight": torch.randn(4, 16, 24).bfloat16()})
    offsets = torch.tensor([5, 5, 21, 36], dtype=torch.int64)
    x = torch.randn(40, 24).bfloat16().requires_grad_()
    y = grouped_linear(x, stack, offsets)
    twin, packed = TorchGroupedProduct("BF16", 16, 24, None), tuple(stack.tensors.values())
    slope = torch.randn(40, 16).bfloat16()
    (dx,) = torch.autograd.grad(y, x, slope)
    assert torch.equal(y.detach(), StackedGroupedProduct().forward(x.detach(), offsets, packed))
    torch.testing.assert_close(y.detach(), twin.forward(x.detach(), offsets, packed))
    torch.testing.assert_close(dx, twin.input_gradient(slope, offsets, packed))
    assert not y[36:].any()
    assert not dx[36:].any()


def test_no_tokens_give_nothing() -> None:
    stack = ExpertStack("BF16", {"weight": torch.randn(4, 16, 24).bfloat16()})
    assert grouped_linear(torch.empty(0, 24).bfloat16(), stack, torch.zeros(4, dtype=torch.int32)).shape == (0, 16)
