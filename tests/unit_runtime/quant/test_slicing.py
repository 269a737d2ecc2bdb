"""Cutting commutes with dequantising wherever a cut is allowed, and every other cut is refused: any shape, any cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import packed_weights
from fakes.packed_weights import bits
from hypothesis import given, settings
from hypothesis import strategies as st

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.quant import mxfp4
from orbit_runtime.quant.formats import FORMATS, Weight, cut_multiples, format_of, slice_weight
from orbit_runtime.quant.linear import FrozenLinear

WRITEABLE = sorted(layout for layout, codec in FORMATS.items() if codec.quantize is not None)
WIDTHS = {"NVFP4": 16, "NVFP4ModelOpt": 16, "MXFP4": 32, "MXFP4V4": 32, "INT4": 32, "INT4Asymmetric": 32}
"""Columns that a layout's weights are a multiple of; 1 where it is not named."""


def made(layout: str, rows: int, columns: int, **settings: Any) -> Weight:
    w = torch.randn(rows, columns, generator=packed_weights.generator(rows * columns))
    quantize = FORMATS[layout].quantize
    assert quantize is not None
    weight: Weight = quantize(w, *((32,) if layout.startswith("INT4") else ()), **settings)
    return weight


def dense(weight: Weight) -> torch.Tensor:
    values: torch.Tensor = FORMATS[format_of(weight)].dequantize(weight)
    return values


def is_allowed(cut: int, size: int, multiple: int) -> bool:
    return cut % multiple == 0 or cut == size


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_cut_is_the_cut_of_the_values_or_is_refused(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(WRITEABLE))
    width = WIDTHS.get(layout, 1)
    rows, columns = data.draw(st.integers(1, 300)), width * data.draw(st.integers(1, 300 // width))
    weight = made(layout, rows, columns)
    cuts = []
    for size, multiple in zip((rows, columns), cut_multiples(weight), strict=True):
        aligned = st.integers(0, size // multiple).map(lambda n, m=multiple: n * m)
        point = st.one_of(aligned, st.just(size), st.integers(0, size))
        start = data.draw(point.filter(lambda cut, size=size: cut < size))
        cuts.append((start, data.draw(point.filter(lambda cut, start=start: cut > start))))
    chosen = [slice(*cut) for cut in cuts]
    allowed = all(
        is_allowed(cut, size, multiple)
        for pair, size, multiple in zip(cuts, weight.shape, cut_multiples(weight), strict=True)
        for cut in pair
    )
    if not allowed:
        with pytest.raises(UnsupportedError, match="cut through a group"):
            slice_weight(weight, *chosen)
        return
    part = slice_weight(weight, *chosen)
    assert format_of(part) == layout
    assert torch.equal(bits(dense(part)), bits(dense(weight)[chosen[0], chosen[1]]))


@pytest.mark.parametrize("layout", WRITEABLE)
@pytest.mark.parametrize("ways", [2, 4])
def test_tensor_parallel_parts_make_the_whole_product(layout: str, ways: int) -> None:
    """Rows cut: outputs side by side. Columns cut: outputs added. As column- and row-parallel layers do."""
    weight = made(layout, 512, 512)
    x = torch.randn(3, 512, generator=packed_weights.generator(5), dtype=torch.float64)
    whole, run = FrozenLinear(weight)(x), 512 // ways
    runs = [slice(start, start + run) for start in range(0, 512, run)]
    by_rows = [FrozenLinear(slice_weight(weight, each))(x) for each in runs]
    torch.testing.assert_close(torch.cat(by_rows, -1), whole, rtol=1e-12, atol=1e-12)
    by_columns = [FrozenLinear(slice_weight(weight, slice(None), each))(x[:, each]) for each in runs]
    torch.testing.assert_close(torch.stack(by_columns).sum(0), whole, rtol=1e-12, atol=1e-9)


def test_experts_of_gpt_oss_are_runs_of_rows_that_share_memory() -> None:
    packed = packed_weights.mxfp4(4 * 24, 64)
    tensors = {"e.g_blocks": packed.qdata.view(4, 24, 2, 16), "e.g_scales": packed.scale.view(4, 24, 2)}
    whole = mxfp4.from_checkpoint(tensors, "e.g", "MXFP4GptOss")
    for index in range(4):
        one = mxfp4.expert(whole, index)
        run = slice(24 * index, 24 * (index + 1))
        assert one.shape == (24, 64)
        assert one.qdata.untyped_storage().data_ptr() == packed.qdata.untyped_storage().data_ptr()
        assert torch.equal(bits(dense(one)), bits(dense(whole)[run]))
        assert torch.equal(bits(dense(slice_weight(whole, run))), bits(dense(one)))
        assert format_of(slice_weight(whole, run)) == "MXFP4GptOss"


@pytest.mark.parametrize("layout", WRITEABLE)
def test_an_owned_cut_shares_no_memory_with_the_whole(layout: str) -> None:
    weight = made(layout, 256, 256)
    half = slice_weight(weight, slice(0, 128), owned=True)
    assert format_of(half) == layout
    assert torch.equal(bits(dense(half)), bits(dense(weight)[:128]))
    memory = {t.untyped_storage().data_ptr() for t in FORMATS[layout].buffers(weight).values()}
    for tensor in FORMATS[layout].buffers(half).values():
        assert tensor.untyped_storage().data_ptr() not in memory
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("per_tensor", [False, True])
def test_one_scale_for_a_row_or_for_all_may_be_cut_anywhere(per_tensor: bool) -> None:
    weight = made("FP8", 64, 96, per_tensor=per_tensor)
    assert cut_multiples(weight) == (1, 1)
    part = slice_weight(weight, slice(10, 20), slice(7, 50))
    assert torch.equal(bits(dense(part)), bits(dense(weight)[10:20, 7:50]))
