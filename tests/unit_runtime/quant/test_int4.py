"""The INT4 codec against its oracle, compressed-tensors, bit for bit, and against a slow twin in plain Python."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from orbit_runtime.errors import ModelError
from orbit_runtime.quant import int4
from orbit_runtime.quant.formats import FORMATS, format_of


def oracle_scheme(group: int) -> QuantizationScheme:
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
    return QuantizationScheme(targets=["Linear"], weights=weights)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def random_weight(rows: int, columns: int, group: int) -> int4.INT4Weight:
    """Every code, and scales of every magnitude: any bits but infinities and NaN."""
    generator = torch.Generator().manual_seed(rows * columns + group)
    codes = torch.randint(-8, 8, (rows, columns), generator=generator, dtype=torch.int8)
    scale_bits = torch.randint(0, 0x7F80, (rows, columns // group), generator=generator, dtype=torch.int16)
    sign = torch.randint(0, 2, scale_bits.shape, generator=generator, dtype=torch.int16) * -0x8000
    scale = (scale_bits | sign.to(torch.int16)).view(torch.bfloat16)
    return int4.INT4Weight(int4.pack(codes), scale, (rows, columns), group)


@pytest.mark.parametrize("group", [32, 128])
def test_dequantised_bits_equal_compressed_tensors_for_scales_of_every_magnitude(group: int) -> None:
    weight = random_weight(96, 512, group)
    state = {"weight_packed": weight.qdata, "weight_scale": weight.scale, "weight_shape": torch.tensor(weight.shape)}
    expected = PackedQuantizationCompressor.decompress(state, oracle_scheme(group))["weight"]
    assert torch.equal(bits(int4.dequantize(weight)), bits(expected))
    assert torch.equal(bits(int4.dequantize(weight, torch.float32)), bits(expected.float()))


@pytest.mark.parametrize("group", [32, 128])
def test_quantising_gives_the_codes_and_scales_of_compressed_tensors(group: int) -> None:
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    w[3], w[4], w[5] = 0, w[4] * 1e-30, w[5] * 1e30
    grouped, scheme = w.view(64, -1, group), oracle_scheme(group)
    scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme.weights)
    expected = PackedQuantizationCompressor.compress({"weight": w, "weight_scale": scale}, scheme)
    weight = int4.quantize(w, group)
    assert torch.equal(bits(weight.scale), bits(scale))
    assert torch.equal(weight.qdata, expected["weight_packed"])


def test_one_row_by_hand() -> None:
    codes = torch.tensor([[-8, -7, -1, 0, 1, 2, 3, 7]], dtype=torch.int8)
    packed = int4.pack(codes)
    assert packed.tolist() == [[int.from_bytes(bytes([0x10, 0x87, 0xA9, 0xFB]), "little", signed=True)]]
    weight = int4.INT4Weight(packed, torch.tensor([[0.5]]).bfloat16(), (1, 8), 8)
    assert int4.dequantize(weight, torch.float32).tolist() == [[-4.0, -3.5, -0.5, 0.0, 0.5, 1.0, 1.5, 3.5]]


def test_the_product_is_rounded_to_bf16_once_and_then_widened() -> None:
    scale = torch.tensor([[1 + 2**-7]]).bfloat16()
    weight = int4.INT4Weight(int4.pack(torch.full((1, 8), 7, dtype=torch.int8)), scale, (1, 8), 8)
    exact = 7 * (1 + 2**-7)
    value = int4.dequantize(weight, torch.float32)[0, 0].item()
    assert value != exact
    assert value == torch.tensor(exact).bfloat16().item()


def test_unpack_inverts_pack() -> None:
    weight = random_weight(16, 64, 32)
    codes = int4.unpack(weight.qdata)
    assert codes.unique().tolist() == list(range(-8, 8))
    assert torch.equal(int4.pack(codes), weight.qdata)


def checkpoint(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    weight = random_weight(16, 64, 32)
    tensors = {"weight_packed": weight.qdata, "weight_scale": weight.scale, "weight_shape": torch.tensor([16, 64])}
    return {f"layer.{name}": tensor for name, tensor in (tensors | changes).items()}


def test_a_checkpoint_s_tensors_are_taken_as_they_are() -> None:
    tensors = checkpoint()
    weight = int4.from_checkpoint(tensors, "layer")
    assert weight.qdata is tensors["layer.weight_packed"]
    assert weight.scale is tensors["layer.weight_scale"]
    assert (weight.shape, weight.block_size) == ((16, 64), 32)
    assert format_of(weight) == "INT4"
    assert FORMATS["INT4"].num_bytes(weight) == 16 * 64 // 2 + 16 * 2 * 2


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("weight_packed", torch.zeros(16, 7, dtype=torch.int32)),
        ("weight_packed", torch.zeros(16, 8, dtype=torch.int64)),
        ("weight_scale", torch.ones(16, 2)),
        ("weight_scale", torch.ones(8, 2).bfloat16()),
        ("weight_scale", torch.ones(16, 5).bfloat16()),
    ],
)
def test_tensors_that_do_not_fit_together_are_named(name: str, tensor: torch.Tensor) -> None:
    with pytest.raises(ModelError) as caught:
        int4.from_checkpoint(checkpoint(**{name: tensor}), "layer")
    assert caught.value.where == f"layer.{name}"


def test_a_missing_tensor_is_named() -> None:
    tensors = checkpoint()
    del tensors["layer.weight_scale"]
    with pytest.raises(ModelError, match=r"layer\.weight_scale"):
        int4.from_checkpoint(tensors, "layer")
