"""Logits of a BF16 policy are rounded to fp32 only: compared with double precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.logprobs import WIDENED_ROWS, head_gives_same_bits, logits_of, token_logprobs
from orbit_runtime.policy.packed import Branch
from orbit_runtime.quant.bf16 import BF16Weight
from orbit_runtime.quant.linear import FrozenLinear

TOKENS = [3, 27, 26, 20, 27, 25, 38, 1, 4, 30, 31, 1]
LORA = AdapterConfig("LoRA", ("q_proj", "o_proj"), rank=4)


def hidden_of(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).mul_(3).bfloat16()


def test_logits_and_gradients_are_those_of_double_precision() -> None:
    policy = load_policy(builtin_folder("tiny-adder", "BF16"), LORA, compute_dtype=torch.bfloat16)
    weight = policy.model.get_output_embeddings().packed.qdata
    hidden = hidden_of(40, weight.shape[1]).requires_grad_(True)
    logits = policy.head(hidden)
    exact = hidden.detach().double() @ weight.double().T
    assert logits.dtype == torch.float32
    assert float((logits.detach() - exact).abs().max()) < 1e-4 < float((exact - exact.bfloat16()).abs().max())
    slope = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (grad,) = torch.autograd.grad(logits, hidden, slope)
    expected = slope.double() @ weight.double()
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad.double(), expected, rtol=2**-6, atol=float(expected.abs().max()) * 2**-7)


@pytest.mark.parametrize("rows", [500, 2 * WIDENED_ROWS])
def test_a_head_is_tried_in_silence(rows: int, capfd: pytest.CaptureFixture[str]) -> None:
    """MKL writes to the terminal when it is handed a matrix without rows."""
    head_gives_same_bits(nn.Linear(32, rows, bias=False, dtype=torch.bfloat16), torch.bfloat16)
    assert capfd.readouterr() == ("", "")


def test_a_head_that_is_trained_gets_its_gradient() -> None:
    head = nn.Linear(16, 32, bias=False, dtype=torch.bfloat16)
    hidden = hidden_of(8, 16)
    logits_of(head, hidden).square().sum().backward()
    assert head.weight.grad is not None
    exact = 2 * (hidden.double() @ head.weight.detach().double().T).T @ hidden.double()
    torch.testing.assert_close(head.weight.grad.double(), exact, rtol=2**-6, atol=float(exact.abs().max()) * 2**-7)


@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_of_log_probs_in_bf16_are_those_of_double_precision(entropy: bool) -> None:
    head = nn.Linear(16, 5000, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    hidden = hidden_of(40, 16).requires_grad_(True)
    targets = torch.arange(40) * 100
    found = token_logprobs(hidden, targets, lambda x: logits_of(head, x), vocabulary=5000, chunk_elements=5000 * 16)
    exact = hidden.detach().double().requires_grad_(True)
    logprobs = torch.log_softmax(exact @ head.weight.double().T, -1)
    wanted = (logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1))
    weights = torch.linspace(-1, 1, 40)
    for each, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(each.double(), expected, rtol=1e-5, atol=1e-5)
    (grad,), (expected,) = (
        torch.autograd.grad((values[0] * weights).sum() + entropy * values[1].sum(), of)
        for values, of in ((found, hidden), (wanted, exact))
    )
    torch.testing.assert_close(grad.double(), expected, rtol=2**-5, atol=float(expected.abs().max()) * 2**-7)


@pytest.mark.parametrize("width", [64, 33], ids=["panels", "odd"])
def test_a_head_that_is_held_as_products_read_it_has_the_same_logits(width: int) -> None:
    head = FrozenLinear(BF16Weight(hidden_of(100, width)))
    hidden = hidden_of(20, width)
    exact = hidden.double() @ head.packed.qdata.double().T  # type: ignore[attr-defined]
    head.order()
    found = logits_of(head, hidden)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


def test_a_policy_in_fp32_and_a_head_with_a_bias_are_left_to_the_layer() -> None:
    biased = nn.Linear(16, 32, dtype=torch.bfloat16)
    assert logits_of(biased, hidden_of(4, 16)).dtype == torch.bfloat16
    policy = load_policy(builtin_folder("tiny-adder", "BF16"), LORA)
    hidden = hidden_of(16, policy.model.get_output_embeddings().in_features).float()
    assert torch.equal(policy.head(hidden), policy.model.get_output_embeddings()(hidden))


def test_log_probs_of_bf16_come_nearer_to_those_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = builtin_folder("tiny-adder", "BF16")
    exact, policy = load_policy(folder, LORA), load_policy(folder, LORA, compute_dtype=torch.bfloat16)
    wanted, found = logprobs(exact), logprobs(policy)
    monkeypatch.setattr("orbit_runtime.policy.model.logits_of", lambda head, hidden: head(hidden))
    assert float((found - wanted).abs().mean()) < float((logprobs(policy) - wanted).abs().mean())


def logprobs(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        values, _ = policy.logprobs(policy.pack([Branch(0, TOKENS[:3], TOKENS[3:])]))
    return values
