"""Experts with adapters, from buffers as SGLang has them: products against dense matrices, and reading them back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from orbit_runtime.adapters.oft import rotate, rotations
from orbit_runtime.sglang_plugin.experts import AdaptedExperts, AdaptedWeight, LoRAOnExperts, expert_buffers
from orbit_runtime.sglang_plugin.readback import _split_experts
from orbit_runtime.sglang_plugin.shards import join

EXPERTS, HIDDEN, INNER, RANK, ROOM = 4, 12, 8, 2, 3
"""`ROOM` is the largest rank that the buffers are made for."""
SLOT, SCALING = 1, 2.0
NAME = "model.layers.0.mlp.experts"


def adapter(is_shared_outer: bool) -> dict[str, torch.Tensor]:
    """As files stack it: w1 gate, w3 up, w2 down."""
    outer, draw = 1 if is_shared_outer else EXPERTS, torch.Generator().manual_seed(3)
    shapes = {f"{w}.lora_A": (outer, RANK, HIDDEN) for w in ("w1", "w3")}
    shapes |= {f"{w}.lora_B": (EXPERTS, INNER, RANK) for w in ("w1", "w3")}
    shapes |= {"w2.lora_A": (EXPERTS, RANK, INNER), "w2.lora_B": (outer, HIDDEN, RANK)}
    return {name: torch.randn(shape, generator=draw).bfloat16().float() for name, shape in shapes.items()}


def wrapper(published: dict[str, torch.Tensor], scaling: float = SCALING) -> SimpleNamespace:
    """SGLang's: room between gate and up, zeros where a rank ends, the scaling in B; other slots hold other things."""
    outer, inner = len(published["w1.lora_A"]), published["w1.lora_B"].shape[1]
    up_A, up_B = torch.zeros(outer, 2 * ROOM, HIDDEN), torch.zeros(EXPERTS, 2 * inner, ROOM)
    down_A, down_B = torch.zeros(EXPERTS, ROOM, inner), torch.zeros(outer, HIDDEN, ROOM)
    up_A[:, :RANK], up_A[:, ROOM : ROOM + RANK] = published["w1.lora_A"], published["w3.lora_A"]
    up_B[:, :inner, :RANK] = published["w1.lora_B"] * scaling
    up_B[:, inner:, :RANK] = published["w3.lora_B"] * scaling
    down_A[:, :RANK], down_B[..., :RANK] = published["w2.lora_A"], published["w2.lora_B"] * scaling
    buffers = {}
    for name, held in (
        ("gate_up_lora_a", up_A),
        ("gate_up_lora_b", up_B),
        ("down_lora_a", down_A),
        ("down_lora_b", down_B),
    ):
        buffers[f"{name}_weights"] = torch.stack([torch.randn_like(held), held, torch.randn_like(held)])
    return SimpleNamespace(**buffers)


@pytest.mark.parametrize("is_shared_outer", [True, False])
def test_an_experts_product_is_that_of_its_weight_and_its_adapter(is_shared_outer: bool) -> None:
    published = adapter(is_shared_outer)
    layer = SimpleNamespace(
        w13_weight=torch.randn(EXPERTS, 2 * INNER, HIDDEN),
        w2_weight=torch.randn(EXPERTS, HIDDEN, INNER),
        num_experts=EXPERTS,
    )
    adapted = AdaptedExperts(layer, LoRAOnExperts(wrapper(published)).products(SLOT))
    assert adapted.num_experts == EXPERTS

    def update(name: str, expert: int) -> torch.Tensor:
        A, B = published[f"{name}.lora_A"], published[f"{name}.lora_B"]
        return SCALING * B[expert % len(B)] @ A[expert % len(A)]

    for expert in range(EXPERTS):
        x, h = torch.randn(5, HIDDEN), torch.randn(5, INNER)
        gate_up = layer.w13_weight[expert] + torch.cat([update("w1", expert), update("w3", expert)])
        torch.testing.assert_close(F.linear(x, adapted.w13_weight[expert]), x @ gate_up.t(), rtol=0, atol=1e-4)  # type: ignore[arg-type]
        down = layer.w2_weight[expert] + update("w2", expert)
        torch.testing.assert_close(F.linear(h, adapted.w2_weight[expert]), h @ down.t(), rtol=0, atol=1e-4)  # type: ignore[arg-type]


def test_a_turned_experts_product_is_that_of_its_turned_input() -> None:
    R = rotations(torch.randn(INNER // 4, 6), 4, "Cayley", 0)
    weight, h = torch.randn(HIDDEN, INNER), torch.randn(5, INNER)
    assert torch.equal(F.linear(h, AdaptedWeight(weight, turn=R)), F.linear(rotate(h, R), weight))  # type: ignore[arg-type]


def test_another_operation_with_an_adapted_weight_is_no_silent_base() -> None:
    with pytest.raises(AssertionError, match="does not"):
        torch.mm(torch.randn(2, 2), AdaptedWeight(torch.randn(2, 2)))  # type: ignore[arg-type]


def read(
    published: dict[str, torch.Tensor], scaling: float, is_shared_outer: bool, ranks: int = 1
) -> dict[str, torch.Tensor]:
    """From the buffers of so many ranks, as SGLang cuts them: what is inner of the experts, and only that."""
    inner = {"w1.lora_B": 1, "w3.lora_B": 1, "w2.lora_A": 2}
    pieces = []
    for rank in range(ranks):
        own = {
            name: each.chunk(ranks, inner[name])[rank] if name in inner else each for name, each in published.items()
        }
        held = [buffer[SLOT] for buffer in expert_buffers(wrapper(own, scaling))]
        pieces.append(list(_split_experts(NAME, held, RANK, SCALING, is_shared_outer, rank if ranks > 1 else None)))
    return {name: each.whole() for name, each in join(pieces).items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_shared_outer_factors_are_read_back_as_published(ranks: int) -> None:
    published = adapter(True)
    found = read(published, SCALING, True, ranks)
    assert set(found) == {f"{NAME}.{name}" for name in published}
    assert all(torch.equal(found[f"{NAME}.{name}"], tensor) for name, tensor in published.items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_experts_factors_are_read_back_under_its_own_names(ranks: int) -> None:
    published = adapter(False)
    found = read(published, SCALING, False, ranks)
    assert len(found) == 6 * EXPERTS
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for name, tensor in published.items():
        stacked, _, kind = name.partition(".")
        for expert in range(EXPERTS):
            assert torch.equal(found[f"{NAME}.{expert}.{names[stacked]}.{kind}"], tensor[expert])


def test_a_wrong_scaling_shows_in_what_is_read_back() -> None:
    published = adapter(True)
    found = read(published, 2 * SCALING, True)
    assert torch.equal(found[f"{NAME}.w2.lora_B"], 2 * published["w2.lora_B"])
