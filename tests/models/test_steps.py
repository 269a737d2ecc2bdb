"""The decoder's small steps by Orbit's own kernels, against fp64, and alone as among others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from orbit_runtime.policy import native
from orbit_runtime.policy.gradients import gated, normed, turned
from orbit_runtime.policy.logprobs import logprobs_of

pytestmark = pytest.mark.skipif(native.steps() is None, reason="no C compiler: torch's operations take the steps")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["FP32", "BF16"])
TOKENS = 21
SIZES = [(3, 6), (4, 16), (9, 64), (2, 80)]
"""Heads, and the size of each: not all are whole vectors."""


def made(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def is_close(found: Tensor, exact: Tensor) -> None:
    """To the rounding of its dtype, and of what was added up."""
    bound = 2**-8 if found.dtype is torch.bfloat16 else 2e-6
    least = bound * float(exact.detach().abs().max()) / 8
    torch.testing.assert_close(found.double(), exact.double(), rtol=bound, atol=least)


def gradients(results: Sequence[Tensor], slopes: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.autograd.grad(results, inputs, [s.to(r.dtype) for r, s in zip(results, slopes, strict=True)])


@DTYPES
@pytest.mark.parametrize("size", [6, 64, 576, 1000])
def test_norms_after_an_addition(size: int, dtype: torch.dtype) -> None:
    x, y, weight = made(TOKENS, size).requires_grad_(), made(TOKENS, size + 1)[:, 1:].to(dtype), made(size)
    y = y.contiguous().requires_grad_()
    slopes = made(TOKENS, size), made(size, TOKENS).T.to(dtype)
    found = normed(x, y, weight, 1e-5, dtype)
    wide = [each.detach().double().requires_grad_() for each in (x, y)]
    exact = wide[0] + wide[1], F.rms_norm(wide[0] + wide[1], (size,), weight.double(), 1e-5)
    for pair in zip(
        (*found, *gradients(found, slopes, (x, y))), (*exact, *gradients(exact, slopes, wide)), strict=True
    ):
        is_close(*pair)
    assert found[0].dtype is torch.float32
    with torch.no_grad():
        rows = [normed(x[[at]].clone(), y[[at]], weight, 1e-5, dtype) for at in range(TOKENS)]
        for result, alone in zip(found, zip(*rows, strict=True), strict=True):
            assert torch.equal(torch.cat(alone), result)
        first = normed(x, None, weight, 1e-5, dtype)
        is_close(first[1], F.rms_norm(x.double(), (size,), weight.double(), 1e-5))


@DTYPES
@pytest.mark.parametrize("is_normed", [False, True], ids=["bare", "normed"])
@pytest.mark.parametrize(("heads", "size"), SIZES)
def test_rotations(heads: int, size: int, is_normed: bool, dtype: torch.dtype) -> None:
    x = made(TOKENS, heads + 2, size)[:, 1 : heads + 1].to(dtype).requires_grad_()  # between others
    weight, angle = made(heads, size) if is_normed else None, made(TOKENS, 1, size // 2)
    cos, sin = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)
    slope = made(size, heads, TOKENS).permute(2, 1, 0).to(dtype)
    found = turned(x, cos, sin, weight, 1e-6)
    wide = x.detach().double().requires_grad_()
    before = wide if weight is None else F.rms_norm(wide, (size,), eps=1e-6) * weight
    first, second = before.chunk(2, -1)
    exact = torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)
    is_close(found, exact)
    is_close(*gradients([found], [slope], [x]), *gradients([exact], [slope], [wide]))
    with torch.no_grad():
        for at in range(TOKENS):
            assert torch.equal(turned(x[[at]], cos[[at]], sin[[at]], weight, 1e-6)[0], found[at])


@DTYPES
@pytest.mark.parametrize("size", [6, 64, 1536])
def test_gates(size: int, dtype: torch.dtype) -> None:
    both = (made(TOKENS, 2 * size) * 30).to(dtype).requires_grad_()  # far enough that e^x overflows
    slope = made(TOKENS, size).to(dtype)
    found, wide = gated(both), both.detach().double().requires_grad_()
    exact = F.silu(wide[:, :size]) * wide[:, size:]
    is_close(found, exact)
    is_close(*gradients([found], [slope], [both]), *gradients([exact], [slope], [wide]))
    with torch.no_grad():
        assert torch.equal(torch.cat([gated(row[None]) for row in both]), found)


@pytest.mark.parametrize("vocabulary", [5, 48, 1024, 50_001])
def test_log_probs_entropies_slopes_and_draws(vocabulary: int) -> None:
    logits, targets = made(TOKENS, vocabulary) * 6, torch.arange(TOKENS) % (vocabulary - 3) + 3
    logits[0, :3] = -torch.inf  # cut off
    exact = torch.log_softmax(logits.double(), -1)
    logprobs, entropies = logprobs_of(logits, targets)
    is_close(logprobs, exact[torch.arange(TOKENS), targets])
    is_close(entropies, torch.special.entr(exact.exp()).sum(-1))
    slopes = logits.clone()
    assert torch.equal(native.scored(slopes, targets, entropies=False, slopes=True)[0], logprobs)
    is_close(slopes, exact.exp() - F.one_hot(targets, vocabulary))
    uniforms = torch.rand(TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    uniforms[0] = 0.0  # the first token that is possible
    uniforms[1] = -1.0  # the most probable one
    tokens, drawn = native.drawn(logits, uniforms)
    expected = torch.searchsorted(exact.exp().cumsum(-1), uniforms[:, None], right=True)[:, 0]
    expected[:2] = torch.tensor([3, int(logits[1].argmax())])
    assert torch.equal(tokens, expected)
    assert torch.equal(drawn, logprobs_of(logits, tokens)[0])
    last = native.drawn(logits, torch.full((TOKENS,), 1.0 - 2**-53, dtype=torch.float64))[0]
    assert bool((logprobs_of(logits, last)[0] > -torch.inf).all())


def test_what_is_no_number_stays_none() -> None:
    broken = torch.full((2, 20), torch.nan)
    one, targets = torch.ones(20), torch.zeros(2, dtype=torch.long)
    for found in (
        *normed(broken.clone(), broken, one, 1e-5, torch.bfloat16),
        turned(broken[:, None], *torch.ones(2, 2, 1, 20), one[None], 1e-5),
        gated(broken.bfloat16()),
        *logprobs_of(broken, targets),
        native.drawn(broken, torch.full((2,), 0.5, dtype=torch.float64))[1],
    ):
        assert bool(found.isnan().all())
