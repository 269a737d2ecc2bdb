"""Every codec against the one library that its file names, bit for bit, on random and adversarial tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from fakes import packed_weights as adversarial
from fakes.packed_weights import bits, ordinary_floats, positive_floats
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from orbit_runtime.quant import awq, fp8, fp8_block, gptq, int4_asymmetric, mxfp4, nvfp4
from orbit_runtime.quant.formats import FORMATS


def scheme(**weights: Any) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


NVFP4_SCHEME = scheme(num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn)
MXFP4_SCHEME = scheme(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)


def int4_scheme(group: int) -> QuantizationScheme:
    return scheme(num_bits=4, type="int", symmetric=False, strategy="group", group_size=group)


@pytest.mark.parametrize("make", [positive_floats, ordinary_floats])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_blocks_equal_transformers(make: Any, dtype: torch.dtype) -> None:
    scale = make(3, 2, seed=10).clamp(max=1e38).to(dtype)
    weight = adversarial.fp8_block(384, 256, scale)
    expected = Fp8Dequantize(None)._dequantize_one(weight.qdata, scale, output_dtype=torch.bfloat16)
    assert torch.equal(bits(fp8_block.dequantize(weight)), bits(expected))
    assert torch.equal(bits(fp8_block.dequantize(weight, torch.float32)), bits(expected.float()))


@pytest.mark.parametrize(("rows", "columns"), [(200, 256), (256, 200), (130, 72), (8, 8)])
def test_partial_last_fp8_blocks_equal_compressed_tensors(rows: int, columns: int) -> None:
    scale = ordinary_floats(-(-rows // 128), -(-columns // 128), seed=11)
    weight = adversarial.fp8_block(rows, columns, scale)
    tensors = {"m.weight": weight.qdata, "m.weight_scale_inv": scale}
    expected = FP8BlockDequantizer(targets=["Linear"])._create_dequantized_weight(*tensors.values())
    assert torch.equal(bits(fp8_block.dequantize(weight)), bits(expected))
    with pytest.raises(ValueError, match="not divisible"):
        # The named oracle refuses these sizes unless the number of blocks happens to divide them; then it is wrong.
        Fp8Dequantize(None)._dequantize_one(adversarial.fp8_block(201, 256, scale).qdata, torch.ones(2, 2))


@pytest.mark.parametrize("shape", [(96, 1), (96,), (1,), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_rows_and_tensors_equal_compressed_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    scale = positive_floats(96, seed=12)[: torch.Size(shape).numel()].view(shape).clamp(max=1e35).to(dtype)
    weight = adversarial.fp8(96, 256, scale)
    oracle_scale = scale.view(96, 1) if scale.numel() > 1 else scale
    parts = {"weight": weight.qdata, "weight_scale": oracle_scale.float()}
    decompressed = FloatQuantizationCompressor.decompress(parts, scheme(num_bits=8, type="float", strategy="channel"))
    assert torch.equal(bits(fp8.dequantize(weight)), bits(decompressed["weight"].bfloat16()))
    # With the scales as they are, BF16 ones make the library multiply in BF16: the same values.
    parts["weight_scale"] = oracle_scale
    as_stored = FloatQuantizationCompressor.decompress(parts, scheme(num_bits=8, type="float", strategy="channel"))
    assert torch.equal(bits(fp8.dequantize(weight)), bits(as_stored["weight"].bfloat16()))


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("global_scale", [1.0, 2688.0 / 0.37, 1e-30, 3.1e30, 1e-39])
def test_nvfp4_equals_compressed_tensors(global_scale: float, negative: bool) -> None:
    weight = adversarial.nvfp4(96, 256, -global_scale if negative else global_scale)
    if negative:
        weight = replace(weight, scale=(weight.scale.view(torch.uint8) | 0x80).view(torch.float8_e4m3fn))
    expected = NVFP4PackedCompressor.decompress(nvfp4.buffers(weight), NVFP4_SCHEME)["weight"]
    assert torch.equal(bits(nvfp4.dequantize(weight)), bits(expected))
    assert torch.equal(bits(nvfp4.dequantize(weight, torch.float32)), bits(expected.float()))


@pytest.mark.parametrize("factor", [1.0, 0.37 / 2688.0, 1e-30, 3.1e30, 1e-39, 1e-45])
def test_nvfp4_of_modelopt_equals_numpy_in_the_order_of_its_oracle(factor: float) -> None:
    """The oracle itself, torchao, is asked by `make vendor-table`; numpy's fp32 is not torch's code either."""
    weight = adversarial.nvfp4(96, 256, factor, "NVFP4ModelOpt")
    packed = weight.qdata.numpy()
    codes = np.stack((packed & 15, packed >> 4), -1).reshape(96, 256)
    sign = np.where(codes & 8, np.float32(-1), np.float32(1))
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)[codes & 7]
    with np.errstate(over="ignore", under="ignore"):
        scale = weight.scale.float().numpy() * np.float32(factor)
        exact = (sign * magnitude) * scale.repeat(16, axis=1)
    assert torch.equal(bits(nvfp4.dequantize(weight)), bits(torch.from_numpy(exact).bfloat16()))


def test_mxfp4_equals_transformers_and_compressed_tensors() -> None:
    weight = adversarial.mxfp4(96, 256)
    values = mxfp4.dequantize(weight)
    blocks = weight.qdata.view(3, 32, 8, 16)
    transposed = _convert_moe_packed_tensors(blocks, weight.scale.view(3, 32, 8))
    assert torch.equal(bits(values), bits(transposed.transpose(1, 2).reshape(96, 256)))
    oracle = MXFP4PackedCompressor.decompress(mxfp4.buffers(weight), MXFP4_SCHEME)["weight"]
    assert torch.equal(bits(values), bits(oracle))


def test_the_three_mxfp4_layouts_hold_the_same_values() -> None:
    weight, deepseek = adversarial.mxfp4(96, 256), adversarial.mxfp4(96, 256, "MXFP4V4")
    tensors = {"e.g_blocks": weight.qdata.view(3, 32, 8, 16), "e.g_scales": weight.scale.view(3, 32, 8)}
    gpt_oss = mxfp4.from_checkpoint(tensors, "e.g", "MXFP4GptOss")
    for other in (deepseek, gpt_oss):
        assert torch.equal(bits(mxfp4.dequantize(weight)), bits(mxfp4.dequantize(other)))
    assert gpt_oss.qdata.data_ptr() == weight.qdata.data_ptr()
    assert torch.equal(bits(mxfp4.dequantize(mxfp4.expert(gpt_oss, 1))), bits(mxfp4.dequantize(weight)[32:64]))
    read = Fp8Dequantize(None)._dequantize_one(deepseek.qdata, deepseek.scale, output_dtype=torch.bfloat16)
    assert torch.equal(bits(read), bits(mxfp4.dequantize(deepseek)))


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(
    ("rows", "dtype"), [(96, torch.bfloat16), (93, torch.bfloat16), (96, torch.float16), (90, torch.float32)]
)
def test_asymmetric_int4_equals_compressed_tensors(group: int, rows: int, dtype: torch.dtype) -> None:
    weight = adversarial.int4_asymmetric(rows, 256, group, dtype)
    parts = FORMATS["INT4Asymmetric"].to_checkpoint(weight)
    expected = PackedQuantizationCompressor.decompress(parts, int4_scheme(group))["weight"]
    if dtype is not torch.bfloat16:
        parts["weight_scale"] = weight.scale.float()
        expected = PackedQuantizationCompressor.decompress(parts, int4_scheme(group))["weight"].bfloat16()
    assert torch.equal(bits(int4_asymmetric.dequantize(weight)), bits(expected))


def awq_tensors(rows: int, columns: int, group: int) -> dict[str, torch.Tensor]:
    words = adversarial.random_bytes(columns, rows // 2, seed=13).view(torch.int32)
    zeros = adversarial.random_bytes(columns // group, rows // 2, seed=14).view(torch.int32)
    scales = ordinary_floats(columns // group, rows, seed=15).half()
    return {"m.qweight": words, "m.qzeros": zeros, "m.scales": scales}


def test_awq_is_laid_out_as_compressed_tensors_converts_it() -> None:
    tensors = awq_tensors(64, 256, 128)
    weight = awq.from_checkpoint(tensors, "m")
    expected = AutoAWQConverter(group_size=128).process(dict(tensors))
    assert torch.equal(weight.qdata, expected["m.weight_packed"])
    assert torch.equal(weight.zero_point, expected["m.weight_zero_point"])
    assert torch.equal(weight.scale, expected["m.weight_scale"])


@pytest.mark.parametrize("version", ["GPTQ", "GPTQv2"])
def test_gptq_equals_a_slow_twin_code_by_code(version: str) -> None:
    rows, columns, group = 16, 64, 32
    qweight = adversarial.random_bytes(columns // 8, rows * 4, seed=16).view(torch.int32)
    qzeros = adversarial.random_bytes(columns // group, rows // 2, seed=17).view(torch.int32)
    scales = ordinary_floats(columns // group, rows, seed=18).half()
    tensors = {"m.qweight": qweight, "m.qzeros": qzeros, "m.scales": scales, "m.g_idx": torch.arange(64).int() // 32}
    weight = FORMATS[version].from_checkpoint(tensors, "m")
    values = int4_asymmetric.dequantize(weight, torch.float32)
    for row in range(rows):
        for column in range(columns):
            code = (int(qweight[column // 8, row]) >> (4 * (column % 8))) & 15
            # Version 1 lacks one in each of the eight, subtracted from the word as a whole.
            word = int(qzeros[column // group, row // 8]) + (0x11111111 if version == "GPTQ" else 0)
            zero = (word >> (4 * (row % 8))) & 15
            exact = torch.tensor((code - zero) * scales[column // group, row].item(), dtype=torch.float64)
            assert values[row, column].item() == exact.float().bfloat16().item()
    with pytest.raises(Exception, match="desc_act"):
        gptq.from_checkpoint(tensors | {"m.g_idx": torch.arange(64).int().flip(0) // 32}, "m")


def random_matrix() -> torch.Tensor:
    """With a dead row, a faint one, a loud one, and values that fall on rounding ties."""
    w = torch.randn(64, 256, generator=adversarial.generator(19))
    w[3], w[4], w[5] = 0, w[4] * 1e-12, w[5] * 1e12
    # No -0.0, of which the library's torch code drops the sign; its Triton code keeps it, and so do we.
    w[6] = torch.linspace(-6, 6, 256).mul(4).round() / 4 + 0.0
    return w


def test_quantising_to_mxfp4_gives_compressed_tensors_codes_and_scales() -> None:
    w = random_matrix()
    w[3] = 1.0  # the library's log2 of a block of zeros is not a number
    grouped = w.view(64, -1, 32)
    scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), MXFP4_SCHEME.weights)
    expected = MXFP4PackedCompressor.compress({"weight": w, "weight_scale": scale}, MXFP4_SCHEME)
    weight = mxfp4.quantize(w)
    assert torch.equal(weight.scale, expected["weight_scale"])
    assert torch.equal(weight.qdata, expected["weight_packed"])


def test_quantising_to_nvfp4_gives_compressed_tensors_scales_and_its_codes_but_for_ties() -> None:
    w = torch.randn(64, 256, generator=adversarial.generator(20))
    grouped = w.view(64, -1, 16)
    global_scale = generate_gparam(w.min(), w.max())
    scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), NVFP4_SCHEME.weights, global_scale=global_scale)
    parts = {"weight": w, "weight_scale": scale, "weight_global_scale": global_scale}
    expected = NVFP4PackedCompressor.compress(parts, NVFP4_SCHEME)
    weight = nvfp4.quantize(w)
    assert torch.equal(weight.global_scale, global_scale)
    differing = (weight.scale.view(torch.uint8) != expected["weight_scale"].view(torch.uint8)).float().mean()
    assert differing < 0.002, "the order of two fp32 operations may move a scale that lies on a tie"
    assert (weight.qdata != expected["weight_packed"]).float().mean() < 0.002


@pytest.mark.parametrize("group", [32, 128])
def test_quantising_to_asymmetric_int4_gives_compressed_tensors_codes(group: int) -> None:
    w = random_matrix().bfloat16()
    grouped, wanted = w.view(64, -1, group), int4_scheme(group)
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), wanted.weights)
    alive = torch.arange(64) != 3  # of a row of zeros the library makes NaN zero points
    parts = {"weight": w[alive], "weight_scale": scale[alive], "weight_zero_point": zero[alive]}
    expected = PackedQuantizationCompressor.compress(parts, wanted)
    weight = int4_asymmetric.quantize(w[alive], group)
    assert torch.equal(bits(weight.scale), bits(scale[alive]))
    assert torch.equal(weight.zero_point, expected["weight_zero_point"])
    assert torch.equal(weight.qdata, expected["weight_packed"])
