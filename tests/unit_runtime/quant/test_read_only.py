"""Layouts that are read and never written (GPTQ, AWQ, gpt-oss): bad files, cuts, and the frozen layer over them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fakes import packed_weights
from fakes.packed_weights import bits, ordinary_floats, random_bytes
from torch import Tensor

from orbit_runtime.errors import ModelError, UnsupportedError
from orbit_runtime.quant import mxfp4
from orbit_runtime.quant.formats import FORMATS, Weight, cut_multiples, format_of, slice_weight
from orbit_runtime.quant.linear import FrozenLinear

Tensors = dict[str, Tensor]
ROWS, COLUMNS, GROUP = 64, 256, 64


def gptq() -> Tensors:
    return {
        "m.qweight": random_bytes(COLUMNS // 8, ROWS * 4, seed=1).view(torch.int32),
        "m.qzeros": random_bytes(COLUMNS // GROUP, ROWS // 2, seed=2).view(torch.int32),
        "m.scales": ordinary_floats(COLUMNS // GROUP, ROWS, seed=3).half(),
        "m.g_idx": (torch.arange(COLUMNS) // GROUP).int(),
    }


def awq() -> Tensors:
    return {
        "m.qweight": random_bytes(COLUMNS, ROWS // 2, seed=4).view(torch.int32),
        "m.qzeros": random_bytes(COLUMNS // GROUP, ROWS // 2, seed=5).view(torch.int32),
        "m.scales": ordinary_floats(COLUMNS // GROUP, ROWS, seed=6).half(),
    }


def gpt_oss() -> Tensors:
    packed = packed_weights.mxfp4(ROWS, COLUMNS)
    return {"m_blocks": packed.qdata.view(4, 16, 8, 16), "m_scales": packed.scale.view(4, 16, 8)}


MAKE: dict[str, Callable[[], Tensors]] = {"GPTQ": gptq, "GPTQv2": gptq, "AWQ": awq, "MXFP4GptOss": gpt_oss}


def read(layout: str, **changes: Tensor | None) -> Weight:
    tensors = {name: tensor for name, tensor in (MAKE[layout]() | changes).items() if tensor is not None}
    weight: Weight = FORMATS[layout].from_checkpoint(tensors, "m")
    return weight


def dense(weight: Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    values: Tensor = FORMATS[format_of(weight)].dequantize(weight, dtype)
    return values


def test_every_layout_without_a_writer_is_here() -> None:
    assert set(MAKE) == {layout for layout, codec in FORMATS.items() if codec.quantize is None}


@pytest.mark.parametrize("layout", MAKE)
def test_missing_truncated_and_mislabelled_tensors_are_named(layout: str) -> None:
    assert read(layout).shape == (ROWS, COLUMNS)
    for name, tensor in MAKE[layout]().items():
        with pytest.raises(ModelError, match="missing") as caught:
            read(layout, **{name: None})
        assert caught.value.where == name
        wrong = [tensor[:-1], tensor.double()]
        for changed in wrong:
            if name == "m.g_idx" and changed.dtype is torch.float64:
                continue  # the numbers are what counts
            with pytest.raises(ModelError) as caught:
                read(layout, **{name: changed})
            assert caught.value.where in MAKE[layout]()
            assert caught.value.exit_code == 66


@pytest.mark.parametrize("layout", ["GPTQ", "GPTQv2", "AWQ"])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_scales_of_zero_nan_and_infinity_are_refused(layout: str, value: float) -> None:
    scales = MAKE[layout]()["m.scales"].clone()
    scales[1, 5] = value
    with pytest.raises(ModelError, match="finite and not 0") as caught:
        read(layout, **{"m.scales": scales})
    assert caught.value.where == "m.scales"


def test_columns_in_the_order_of_their_activations_are_refused() -> None:
    shuffled = gptq()["m.g_idx"].flip(0)
    with pytest.raises(ModelError, match="desc_act") as caught:
        read("GPTQ", **{"m.g_idx": shuffled})
    assert caught.value.fix == "use a checkpoint made without activation order"


@pytest.mark.parametrize("layout", MAKE)
def test_a_cut_weight_holds_the_cut_values(layout: str) -> None:
    weight = read(layout)
    rows, columns = cut_multiples(weight)
    cut = (slice(rows, 5 * rows), slice(columns, 3 * columns))
    assert torch.equal(bits(dense(slice_weight(weight, *cut))), bits(dense(weight)[cut]))
    with pytest.raises(UnsupportedError, match="cut through a group"):
        slice_weight(weight, slice(None), slice(0, columns // 2))


@pytest.mark.parametrize("layout", MAKE)
def test_the_frozen_layer_over_them_passes_a_gradient_check_in_fp64(layout: str) -> None:
    layer = FrozenLinear(slice_weight(read(layout), slice(0, 16)), dense_bytes=COLUMNS * 8 * 5)
    # E8M0's largest scales would drown the differences that the check takes.
    if isinstance(layer.packed, mxfp4.MXFP4Weight):
        layer._buffers["scales"] = torch.full_like(layer.packed.scale, 124)
    projection = torch.randn(4, COLUMNS, dtype=torch.float64, generator=packed_weights.generator(2))
    x = torch.randn(2, 4, dtype=torch.float64, generator=packed_weights.generator(3), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x @ projection).square().mean(-1), (x,))
