"""Orbit's products for CPUs against fp64, and how kernels in C are compiled."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from orbit_runtime.quant.kernels import compiled, panels
from orbit_runtime.quant.kernels.dense import grouped_dense

SHAPES = [(1, 2, 1), (3, 64, 48), (8, 96, 100), (13, 576, 144), (300, 130, 49)]
"""Rows, inputs, outputs."""
ROUNDING = {torch.bfloat16: 2**-8, torch.float32: 2**-24}


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16().to(dtype)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["BF16", "FP32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if panels.kernel(request.param) is None:
        pytest.skip("no C compiler, or a processor without AVX512, for BF16 with AMX or without AVX512-BF16")
    found: torch.dtype = request.param
    return found


@pytest.mark.parametrize("rows", [1, 48, 100])
def test_a_weight_in_panels_is_the_same_weight(rows: int) -> None:
    weight_NK = made(rows, 6)
    held = panels.in_panels(weight_NK)
    assert held.shape == (-(-rows // 48), 3, 48, 2)
    assert torch.equal(panels.of_panels(held, rows), weight_NK)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_products_are_those_of_double_precision_and_a_row_alone_has_the_same_bits(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    wide, weight, bias = (made(*each, dtype=dtype) for each in ((rows, inputs + 6), (outputs, inputs), (outputs,)))
    x = wide[:, 4 : 4 + inputs]  # rows of a wider tensor
    exact = x.double() @ weight.double().T
    bound = float((x.double().abs() @ weight.double().abs().T).max()) * inputs * 2**-24
    fp32 = panels.multiply(x, weight, dtype=torch.float32)
    assert float((fp32 - exact).abs().max()) <= bound
    found = panels.multiply(x, weight, bias)
    torch.testing.assert_close(found.double(), exact + bias.double(), rtol=ROUNDING[dtype], atol=bound)
    assert torch.equal(torch.cat([panels.multiply(each, weight, bias) for each in x.split(1)]), found)
    if dtype is torch.bfloat16:
        assert torch.equal(panels.multiply(x, panels.in_panels(weight), bias, columns=outputs), found)
    dy = made(rows, outputs, dtype=dtype)
    if dtype is torch.float32 or outputs % 2 == 0:
        assert panels.can_multiply(dy, outputs)
        expected = dy.double() @ weight.double()
        turned = panels.multiply_turned(dy, weight)
        torch.testing.assert_close(turned.double(), expected, rtol=ROUNDING[dtype], atol=2.0 * bound)
        alone = [panels.multiply_turned(each, weight) for each in dy.split(1)]
        assert torch.equal(torch.cat(alone), turned)


@pytest.mark.parametrize("ranks", [1, 4, 17, 48])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_lora_is_part_of_a_product_and_of_its_gradient(
    rows: int, inputs: int, outputs: int, ranks: int, dtype: torch.dtype
) -> None:
    x, first, weight = (made(*each, dtype=dtype) for each in ((rows, inputs), (ranks, inputs), (outputs, inputs)))
    second, into = made(ranks, outputs + 1, dtype=dtype)[:, 1:], torch.zeros(rows + 1, outputs, dtype=dtype)
    second[: ranks // 3, : outputs // 2] = 0.0  # another member's columns
    second[-(ranks // 3) :, outputs // 2 :] = 0.0
    few = (3.0 * (x.double() @ first.double().T)).to(dtype).double()
    exact = x.double() @ weight.double().T + few @ second.double()
    # A product that lies between two BF16 numbers may be rounded to either.
    bound = float(few.abs().max()) * ROUNDING[dtype] * float(second.double().abs().sum(0).max())
    # fp32 sums round at each addition; beside BF16's rounding that is nothing.
    sums = (inputs + outputs + rows) * 2**-24 * 64.0 if dtype is torch.float32 else 0.0
    found = panels.multiply(x, weight, lora=(first, second, 3.0), out=into[1:])
    torch.testing.assert_close(into[1:].double(), exact, rtol=ROUNDING[dtype], atol=bound + sums)
    alone = [panels.multiply(row, weight, lora=(first, second, 3.0)) for row in x.split(1)]
    assert torch.equal(torch.cat(alone), found)
    dy, of_few = made(rows, outputs, dtype=dtype), made(rows, ranks, dtype=dtype)
    close = {"rtol": ROUNDING[dtype], "atol": sums or 2**-10}
    torch.testing.assert_close(panels.few(x, first, 3.0).double(), few, **close)
    torch.testing.assert_close(panels.summed(of_few, x).double(), of_few.double().T @ x.double(), **close)
    if dtype is torch.float32 or outputs % 2 == 0:
        slope = dy.double() @ weight.double() + of_few.double() @ first.double()
        turned = panels.multiply_turned(dy, weight, (of_few, first))
        torch.testing.assert_close(turned.double(), slope, **close)


def test_a_grouped_products_rows_have_the_same_bits_beside_others(dtype: torch.dtype) -> None:
    """An expert without tokens among them, of weights as they are saved and transposed."""
    x, w_EKN, offsets = made(40, 24, dtype=dtype), made(4, 24, 16, dtype=dtype), torch.tensor([5, 5, 21, 38])
    turned_EKN = w_EKN.transpose(1, 2).contiguous().transpose(1, 2)
    found = grouped_dense(x, w_EKN, offsets)
    expected = torch.cat(
        [part @ w for part, w in zip(x[:38].double().split([5, 0, 16, 17]), w_EKN.double(), strict=True)]
    )
    torch.testing.assert_close(found[:38].double(), expected, rtol=ROUNDING[dtype], atol=1e-5)
    assert torch.equal(found, grouped_dense(x, turned_EKN, offsets))
    assert not found[38:].any()
    fewer = grouped_dense(x[4:22], w_EKN, torch.tensor([1, 1, 17, 18]))
    assert torch.equal(fewer, found[4:22])


def test_no_rows_and_sums_of_nothing_are_empty_and_zero(dtype: torch.dtype) -> None:
    """As a rank has them whose experts got no token."""
    none, weight = torch.empty(0, 16, dtype=dtype), made(7, 16, dtype=dtype)
    assert panels.linear(none, weight).shape == (0, 7)
    assert torch.equal(panels.summed(none, none[:, :5]), torch.zeros(16, 5, dtype=dtype))


@pytest.mark.parametrize("rows", [(2, 5), (0,), (1, 0)])
def test_a_product_has_the_gradients_of_torchs(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    """Of no rows, too: a rank whose experts got no token must reach the others' exchange."""
    x, weight, slope = (made(*each, dtype=dtype) for each in ((*rows, 16), (7, 16), (*rows, 7)))
    own, other = ([each.clone().requires_grad_() for each in (x, weight)] for _ in range(2))
    for product, given in ((panels.product, own), (torch.nn.functional.linear, other)):
        product(*given).backward(slope)
    for found, expected in zip(own, other, strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_a_source_is_compiled_once_and_one_that_cannot_be_is_no_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled.find_compiler() is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("ORBIT_CACHE", str(tmp_path / "cache"))
    source, broken = tmp_path / "four.c", tmp_path / "broken.c"
    source.write_text("int four(void) { return 4; }\n")
    broken.write_text("int four(void) { return }\n")
    compiled.compiled.cache_clear()
    assert [compiled.compiled(source).four() for _ in range(2)] == [4, 4]  # type: ignore[union-attr]
    assert compiled.compiled(broken) is None
    assert [path.suffix for path in (tmp_path / "cache" / "kernels").iterdir()] == [".so"]
    monkeypatch.setenv("CC", "no-such-compiler")
    compiled.compiled.cache_clear()
    assert compiled.compiled(source) is None
    compiled.compiled.cache_clear()


def test_a_team_that_was_mostly_idle_is_small_for_a_while(tmp_path: Path) -> None:
    if compiled.find_compiler() is None:
        pytest.skip("no C compiler")
    source = tmp_path / "team.c"
    source.write_text(
        '#include "vectors.h"\n'
        "void note(int team, double took, double busy) { told(team, took, busy); }\n"
        "int team(int threads) { return team_of(threads); }\n"
    )
    kernel = compiled.compiled(source)
    assert kernel is not None
    kernel.note.argtypes = [ctypes.c_int, ctypes.c_double, ctypes.c_double]
    assert kernel.team(2) == 2
    kernel.note(2, 1.0, 1.9)
    assert kernel.team(2) == 2
    kernel.note(2, 0.001, 0.001)  # too short a time to tell
    assert kernel.team(2) == 2
    kernel.note(2, 1.0, 1.0)
    assert [kernel.team(threads) for threads in (1, 2)] == [1, 1]
    time.sleep(0.25)
    assert kernel.team(2) == 2
    kernel.note(16, 1.0, 8.0)
    assert kernel.team(16) == 8
