"""What holds for every layout alike: round trip, bytes, cuts on group boundaries, the frozen layer, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import packed_weights
from fakes.packed_weights import bits
from torch import Tensor

from orbit_runtime.errors import ModelError, UnsupportedError
from orbit_runtime.model_info.quantization import PRECISIONS
from orbit_runtime.quant import fp8, int4, int4_asymmetric, mxfp4, nvfp4
from orbit_runtime.quant.formats import FORMATS, Weight, cut_multiples, format_of, slice_weight
from orbit_runtime.quant.linear import FrozenLinear

ARGUMENTS: dict[str, tuple[Any, ...]] = {"INT4": (32,), "INT4Asymmetric": (32,)}
WRITEABLE = [layout for layout, codec in FORMATS.items() if codec.quantize is not None]
BYTES_PER_PARAMETER = {
    "BF16": 2.0,
    "INT4": 0.5625,
    "INT4Asymmetric": 0.5625 + 0.5 / 32,
    "FP8": 1 + 4 / 256,
    "FP8Block": 1 + 4 / 128**2,
    "NVFP4": 0.5625 + 4 / 256**2,
    "MXFP4": 0.53125,
}
"""Of a 256 x 256 weight, by hand from the formats' definitions."""


def made(layout: str, rows: int = 256, columns: int = 256) -> Weight:
    w = torch.randn(rows, columns, generator=packed_weights.generator(1)) * 0.1
    quantize = FORMATS[layout].quantize
    assert quantize is not None
    weight: Weight = quantize(w, *ARGUMENTS.get(layout, ()))
    return weight


def dense(weight: Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return FORMATS[format_of(weight)].dequantize(weight, dtype)


def test_the_config_reader_and_the_codecs_know_the_same_layouts() -> None:
    assert {layout: codec.precision for layout, codec in FORMATS.items()} == PRECISIONS


@pytest.mark.parametrize("layout", WRITEABLE)
def test_what_is_written_is_read_back_to_the_same_bits(layout: str) -> None:
    codec, weight = FORMATS[layout], made(layout)
    written = {f"m.{name}": tensor for name, tensor in codec.to_checkpoint(weight).items()}
    assert set(written) == set(codec.tensor_names("m"))
    again = codec.from_checkpoint(written, "m")
    assert format_of(again) == format_of(weight) == layout
    assert torch.equal(bits(dense(again)), bits(dense(weight)))
    for name, tensor in codec.buffers(again).items():
        assert tensor.data_ptr() == codec.buffers(weight)[name].data_ptr(), "taken as it is, not copied"


@pytest.mark.parametrize("layout", WRITEABLE)
def test_quantising_what_was_dequantised_changes_little(layout: str) -> None:
    w = torch.randn(256, 256, generator=packed_weights.generator(1)) * 0.1
    error = (dense(made(layout), torch.float32) - w).norm() / w.norm()
    # INT4 by hand: the largest of 32 normal numbers has E[amax²] = 5.5, so a step of amax/7.5 is off by
    # sqrt(5.5 / 7.5² / 12) = 0.090; that 7.5 is cut to 7, and the quotient rounded to BF16, makes 0.095.
    limit = {"BF16": 0.003, "FP8": 0.03, "INT4": 0.097, "NVFP4": 0.1, "MXFP4": 0.12}[FORMATS[layout].precision]
    assert limit / 4 < error < limit


@pytest.mark.parametrize("layout", list(BYTES_PER_PARAMETER))
def test_bytes_are_those_of_the_tensors_and_of_the_definition(layout: str) -> None:
    codec, weight = FORMATS[layout], made(layout)
    counted = sum(tensor.untyped_storage().nbytes() for tensor in codec.buffers(weight).values())
    assert codec.num_bytes(weight) == counted == BYTES_PER_PARAMETER[layout] * 256 * 256


@pytest.mark.parametrize("layout", WRITEABLE)
def test_a_cut_weight_holds_the_cut_values(layout: str) -> None:
    weight = made(layout)
    whole = dense(weight)
    rows, columns = cut_multiples(weight)
    half, middle = slice(128, 256), slice(columns, 256)
    assert torch.equal(bits(dense(slice_weight(weight, half))), bits(whole[half]))
    assert torch.equal(bits(dense(slice_weight(weight, slice(None), middle))), bits(whole[:, middle]))
    parts = [slice_weight(weight, slice(start, start + 128), slice(0, 128)) for start in (0, 128)]
    assert torch.equal(bits(torch.cat([dense(part) for part in parts])), bits(whole[:, :128]))
    assert format_of(parts[0]) == layout
    if columns > 1:
        with pytest.raises(UnsupportedError, match="cut through a group"):
            slice_weight(weight, slice(None), slice(0, columns // 2))
    if rows > 1:
        with pytest.raises(UnsupportedError, match="cut through a group"):
            slice_weight(weight, slice(rows // 2, 256))


@pytest.mark.parametrize("layout", WRITEABLE)
@pytest.mark.parametrize("dense_bytes", [None, 256 * 8 * 50])
def test_the_frozen_layer_passes_a_gradient_check_in_fp64(layout: str, dense_bytes: int | None) -> None:
    layer = FrozenLinear(slice_weight(made(layout), slice(0, 128)), dense_bytes=dense_bytes)
    projection = torch.randn(4, 256, dtype=torch.float64, generator=packed_weights.generator(2))
    x = torch.randn(2, 4, dtype=torch.float64, generator=packed_weights.generator(3), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x @ projection).square().mean(-1), (x,))


@pytest.mark.parametrize("layout", WRITEABLE)
@pytest.mark.parametrize("dense_bytes", [None, 256 * 4 * 33])
def test_the_frozen_layer_multiplies_by_the_dequantised_weight_and_saves_packed_bytes(
    layout: str, dense_bytes: int | None
) -> None:
    weight = made(layout)
    layer, saved = FrozenLinear(weight, dense_bytes=dense_bytes), []
    x = torch.randn(5, 256, generator=packed_weights.generator(4), requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = layer(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    w = dense(weight, torch.float32)
    torch.testing.assert_close(y, x @ w.t(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx, w.sum(0).expand(5, -1), rtol=1e-5, atol=1e-5)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    # Row numbers, 4 bytes a row, are all that comes on top of the packed tensors.
    assert sum(storages.values()) <= FORMATS[layout].num_bytes(weight) + 4 * 256
    assert torch.equal(bits(dense(layer.packed)), bits(dense(weight)))


def spoiled(tensor: Tensor, value: float) -> Tensor:
    spoilt = tensor.clone()
    spoilt.view(-1)[-1:] = torch.tensor([value]).to(tensor.dtype)
    return spoilt


SCALES = [
    (layout, name)
    for layout in WRITEABLE
    for name in FORMATS[layout].to_checkpoint(made(layout))
    if "scale" in name and FORMATS[layout].precision != "MXFP4"
]


@pytest.mark.parametrize(("layout", "name"), SCALES)
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_scales_of_zero_nan_and_infinity_are_refused(layout: str, name: str, value: float) -> None:
    codec = FORMATS[layout]
    tensors = {f"m.{key}": tensor for key, tensor in codec.to_checkpoint(made(layout)).items()}
    if value == float("inf") and tensors[f"m.{name}"].dtype == torch.float8_e4m3fn:
        value = float("nan")  # E4M3 has no infinity: torch makes 448 of it
    tensors[f"m.{name}"] = spoiled(tensors[f"m.{name}"], value)
    with pytest.raises(ModelError, match="finite and not 0") as caught:
        codec.from_checkpoint(tensors, "m")
    assert (caught.value.where, caught.value.exit_code) == (f"m.{name}", 66)


@pytest.mark.parametrize("layout", [layout for layout in WRITEABLE if layout != "BF16"])
def test_missing_truncated_and_mislabelled_tensors_are_named(layout: str) -> None:
    codec = FORMATS[layout]
    whole = {f"m.{key}": tensor for key, tensor in codec.to_checkpoint(made(layout)).items()}
    for name, tensor in whole.items():
        changes: list[Tensor | None] = [None, tensor.to(torch.int64) if tensor.is_floating_point() else tensor.double()]
        if tensor.ndim == 2 and tensor.shape[0] > 1:
            # Half the rows of codes or of scales; either of the two may be called wrong. One row less would be a
            # sound weight in blocks of 128 rows, the last of which may be partial.
            changes.append(tensor[: tensor.shape[0] // 2])
        for changed in changes:
            if name.endswith("weight_shape") and changed is not None:
                continue
            tensors = {key: value for key, value in (whole | {name: changed}).items() if value is not None}
            with pytest.raises(ModelError) as caught:
                codec.from_checkpoint(tensors, "m")
            assert caught.value.where in whole
            if changed is None:
                assert caught.value.where == name


def test_groups_that_do_not_divide_are_named() -> None:
    qdata = torch.zeros(4, 20, dtype=torch.uint8)
    parts = {"m.weight_packed": qdata, "m.weight_scale": torch.ones(4, 3).to(torch.float8_e4m3fn)}
    for codec, tensors in (
        (nvfp4, parts | {"m.weight_global_scale": torch.ones(1)}),
        (mxfp4, parts | {"m.weight_scale": torch.ones(4, 2, dtype=torch.uint8)}),
    ):
        with pytest.raises(ModelError, match="not a multiple of the group"):
            codec.from_checkpoint(tensors, "m")


def test_the_nan_of_e8m0_is_refused() -> None:
    tensors = {f"m.{name}": tensor for name, tensor in mxfp4.to_checkpoint(made("MXFP4")).items()}
    tensors["m.weight_scale"][3, 1] = 255
    with pytest.raises(ModelError, match="255"):
        mxfp4.from_checkpoint(tensors, "m")


def test_bits_past_the_last_row_of_zero_points_are_refused() -> None:
    weight = packed_weights.int4_asymmetric(93, 64, 32, torch.bfloat16)
    tensors = {f"m.{name}": tensor for name, tensor in FORMATS["INT4Asymmetric"].to_checkpoint(weight).items()}
    int4_asymmetric.from_checkpoint(tensors, "m")
    tensors["m.weight_zero_point"][-1, 0] |= 1 << 20
    with pytest.raises(ModelError, match="past the last of 93 rows") as caught:
        int4_asymmetric.from_checkpoint(tensors, "m")
    assert caught.value.where == "m.weight_zero_point"


def test_codes_that_do_not_fill_a_word_are_refused() -> None:
    tensors = {f"m.{name}": tensor for name, tensor in FORMATS["INT4"].to_checkpoint(made("INT4")).items()}
    tensors["m.weight_shape"] = torch.tensor([256, 252])
    with pytest.raises(ModelError) as caught:
        int4.from_checkpoint(tensors, "m")
    assert caught.value.where == "m.weight_packed"


@pytest.mark.parametrize("per_tensor", [False, True])
def test_scales_of_fp8_are_the_same_to_readers_that_round_them_to_bf16(per_tensor: bool) -> None:
    w = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    weight = fp8.quantize(w, per_tensor=per_tensor)
    assert torch.equal(weight.scale, weight.scale.bfloat16().float())
    assert weight.scale.dtype == torch.float32
    torch.testing.assert_close(fp8.dequantize(weight, torch.float32), w, rtol=0.07, atol=0.01)
