"""Layers that are computed again in the backward pass give the gradients of layers that keep everything, bit for bit.

Belongs here: values, and what runs twice. Does not belong here: bytes (`test_planned_memory`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from orbit_runtime.adapters.layer import TRAINER_SLOT, Dropout
from orbit_runtime.errors import InternalError, UnsupportedError
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.packed import Branch, lay_out_experts
from orbit_runtime.policy.recompute import recompute_layers
from orbit_runtime.quant.saved_products import SavedProducts, computed_once
from tests.integration.tiny_families import make_family
from tests.models.family_matrix import Case, adapter_of, tokens_of
from tests.models.test_determinism import CASES

BRANCHES = [
    Branch(0, tokens_of(3, 1), tokens_of(11, 2)),
    Branch(0, tokens_of(3, 1), tokens_of(7, 3)),
    Branch(1, tokens_of(1, 4), tokens_of(6, 5)),
]


class Operations(TorchDispatchMode):
    """Counts what runs within it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def load(packed: Path, case: Case, dtype: torch.dtype = torch.float32) -> Policy:
    """With values in the adapter, and with dropout where it has one."""
    config = adapter_of(case)
    config = replace(config, dropout=0.2) if case.adapter == "LoRA" else config
    policy = load_policy(packed, config, compute_dtype=dtype)
    with torch.no_grad():
        for number, master in enumerate(policy.injected.parameters()):
            master.add_(0.05 * torch.randn(master.shape, generator=torch.Generator().manual_seed(number)))
    return policy


def gradients(policy: Policy, routed: torch.Tensor | None = None) -> tuple[torch.Tensor, list[torch.Tensor], Counter]:
    """Log-probs, the adapter's gradients, and the operations of the backward pass."""
    batch = policy.pack(BRANCHES)
    with policy.injected.selection.use(TRAINER_SLOT, dropout=Dropout(7)):
        logprobs, _ = policy.logprobs(batch, routed_TLC=routed)
    with Operations() as backward:
        logprobs.square().sum().backward()
    found = []
    for master in policy.injected.parameters():
        assert master.grad is not None
        found.append(master.grad)
        master.grad = None
    return logprobs.detach(), found, backward.counts


def assert_same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert torch.equal(found[0], expected[0])
    assert all(map(torch.equal, found[1], expected[1]))
    assert sum(float(gradient.abs().sum()) for gradient in expected[1]) > 0


@pytest.mark.parametrize("recompute", ["Selective", "PerLayer"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_without_recomputation(case: Case, recompute: str, tmp_path: Path) -> None:
    """Where both go through the model's own layers: the direct decoder's sums are other ones."""
    packed, _ = make_family(tmp_path, case.family, case.layout)
    plain = gradients(replace(load(packed, case), direct=None))
    policy = load(packed, case)
    policy.recompute(recompute)  # type: ignore[arg-type]
    assert_same(gradients(policy), plain)
    # A second pass through the same layers finds nothing of the first.
    assert_same(gradients(policy), plain)


@pytest.mark.parametrize("recompute", ["Selective", "PerLayer"])
@pytest.mark.parametrize("case", [case for case in CASES if case.adapter == "LoRA"], ids=str)
def test_gradients_in_bf16_are_those_without_recomputation(case: Case, recompute: str, tmp_path: Path) -> None:
    """With dropout, so that both passes are the modules'."""
    packed, _ = make_family(tmp_path, case.family, case.layout)
    plain = gradients(load(packed, case, torch.bfloat16))
    policy = load(packed, case, torch.bfloat16)
    policy.recompute(recompute)  # type: ignore[arg-type]
    assert_same(gradients(policy), plain)


@pytest.mark.parametrize("case", [case for case in CASES if case.family == "qwen3_moe"], ids=str)
def test_experts_that_were_given_are_given_to_the_second_pass(case: Case, tmp_path: Path) -> None:
    packed, _ = make_family(tmp_path, case.family, case.layout)
    policy = load(packed, case)
    assert policy.routing is not None
    layers = len(policy.routing.layers)
    batch = policy.pack(BRANCHES)
    inputs = [len(each.prefix_T) + len(each.continuation_T) - 1 for each in BRANCHES]
    chosen = torch.arange(sum(inputs) * layers, dtype=torch.int16).view(-1, layers, 1)
    routed = lay_out_experts(
        BRANCHES, [part.numpy() for part in torch.cat((chosen % 8, (chosen + 3) % 8), -1).split(inputs)], batch
    )
    own, plain = gradients(policy), gradients(policy, routed)
    assert not torch.equal(own[0], plain[0])
    policy.recompute("PerLayer")
    with policy.routing.noted() as noted, policy.traced() as trace:
        assert_same(gradients(policy, routed), plain)
        assert torch.equal(noted(), routed)
    assert len(trace) == len(policy.injected.layers), "the second pass is no use of the adapter"


@pytest.mark.usefixtures("library")
def test_selective_multiplies_by_no_packed_weight_twice_and_per_layer_by_all(tmp_path: Path) -> None:
    """Products of the backward pass: of the frozen weights one for the gradient, and what runs again."""
    # Those of attention are a kernel's, which are not counted.
    case = Case("qwen3", "INT4", "LoRA", "None")
    packed, _ = make_family(tmp_path, case.family, case.layout)
    products = {}
    for recompute in ("None", "Selective", "PerLayer"):
        policy = load(packed, case)
        policy.recompute(recompute)  # type: ignore[arg-type]
        counts = gradients(policy)[2]
        products[recompute] = sum(counts[name] for name in ("mm", "addmm", "bmm", "linear", "addmm_"))
    linears, layers = 7, 2
    # Selective runs LoRA's two products of every linear again but of the last, whose result nothing is computed from.
    assert products["Selective"] - products["None"] == layers * (2 * linears - 1)
    # Early stop: the last linear's LoRA keeps its first product alone; its packed product came before.
    assert products["PerLayer"] - products["Selective"] == layers * linears


def test_a_pass_without_gradient_runs_once(tmp_path: Path) -> None:
    case = CASES[0]
    packed, _ = make_family(tmp_path, case.family, case.layout)
    policy = load(packed, case)
    with torch.no_grad(), policy.injected.selection.use(TRAINER_SLOT):
        expected, _ = policy.logprobs(policy.pack(BRANCHES))
        policy.recompute("Selective")
        found, _ = policy.logprobs(policy.pack(BRANCHES))
    assert torch.equal(found, expected)


def test_a_product_that_was_overwritten_or_never_kept_is_not_taken() -> None:
    results = SavedProducts()
    with results.keeping():
        computed_once(lambda: torch.ones(2)).mul_(2.0)
    with results.taking(), pytest.raises(InternalError, match="did not keep"):
        computed_once(lambda: torch.zeros(2))
    with SavedProducts().taking(), pytest.raises(InternalError, match="did not keep"):
        computed_once(lambda: torch.zeros(2))
    assert torch.equal(computed_once(lambda: torch.zeros(2)), torch.zeros(2))


def test_a_model_without_layers_to_compute_again_is_refused() -> None:
    with pytest.raises(UnsupportedError) as refused:
        recompute_layers(torch.nn.Linear(2, 2), "PerLayer", [])
    assert refused.value.where == "spec.training.recompute"
