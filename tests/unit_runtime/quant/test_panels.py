"""Orbit's BF16 product for CPUs against fp64, and how kernels in C are compiled."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from orbit_runtime.quant.kernels import compiled, panels

SHAPES = [(1, 2, 1), (3, 64, 48), (8, 96, 100), (13, 576, 144), (300, 130, 49)]
"""Rows, inputs, outputs."""


def made(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.fixture
def needs_kernel() -> None:
    if panels.kernel() is None:
        pytest.skip("no C compiler, or a processor with AMX or without AVX512-BF16: oneDNN multiplies here")


@pytest.mark.parametrize("rows", [1, 48, 100])
def test_a_weight_in_panels_is_the_same_weight(rows: int) -> None:
    weight_NK = made(rows, 6)
    held = panels.in_panels(weight_NK)
    assert held.shape == (-(-rows // 48), 3, 48, 2)
    assert torch.equal(panels.of_panels(held, rows), weight_NK)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.usefixtures("needs_kernel")
def test_products_are_those_of_double_precision_and_a_row_alone_has_the_same_bits(
    rows: int, inputs: int, outputs: int
) -> None:
    wide, weight, bias = made(rows, inputs + 6), made(outputs, inputs), made(outputs)
    x = wide[:, 4 : 4 + inputs]  # rows of a wider tensor
    exact, held = x.double() @ weight.double().T, panels.in_panels(weight)
    bound = float((x.double().abs() @ weight.double().abs().T).max()) * inputs * 2**-24
    fp32 = panels.multiply(x, held, None, columns=outputs, dtype=torch.float32)
    assert float((fp32 - exact).abs().max()) <= bound
    found = panels.multiply(x, held, bias, columns=outputs)
    torch.testing.assert_close(found.double(), exact + bias.double(), rtol=2**-8, atol=bound)
    assert torch.equal(torch.cat([panels.multiply(each, held, bias, columns=outputs) for each in x.split(1)]), found)
    if outputs % 2 == 0:
        dy = made(rows, outputs)
        assert panels.can_turn(dy, weight)
        expected = dy.double() @ weight.double()
        torch.testing.assert_close(panels.multiply_turned(dy, weight).double(), expected, rtol=2**-8, atol=2.0 * bound)


@pytest.mark.parametrize("ranks", [1, 4, 17, 48])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.usefixtures("needs_kernel")
def test_lora_is_part_of_a_product_and_of_its_gradient(rows: int, inputs: int, outputs: int, ranks: int) -> None:
    x, first, second = made(rows, inputs), made(ranks, inputs), made(ranks, outputs + 1)[:, 1:]
    weight, into = made(outputs, inputs), torch.zeros(rows + 1, outputs, dtype=torch.bfloat16)
    few = (3.0 * (x.double() @ first.double().T)).bfloat16().double()
    held, exact = panels.in_panels(weight), x.double() @ weight.double().T + few @ second.double()
    # A product that lies between two BF16 numbers may be rounded to either.
    bound = float(few.abs().max()) * 2**-8 * float(second.double().abs().sum(0).max())
    found = panels.multiply(x, held, None, columns=outputs, lora=(first, second, 3.0), out=into[1:])
    torch.testing.assert_close(into[1:].double(), exact, rtol=2**-8, atol=bound)
    alone = [panels.multiply(row, held, None, columns=outputs, lora=(first, second, 3.0)) for row in x.split(1)]
    assert torch.equal(torch.cat(alone), found)
    if outputs % 2 == 0:
        dy, of_few = made(rows, outputs), made(rows, ranks)
        slope = dy.double() @ weight.double() + of_few.double() @ first.double()
        turned = panels.multiply_turned(dy, weight, (of_few, first))
        torch.testing.assert_close(turned.double(), slope, rtol=2**-8, atol=2**-10)


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
