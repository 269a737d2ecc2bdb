"""How other vendors' code reads the same bytes: a table of measured differences, each with its cause.

Run with `-s` to see the table. ModelOpt and torchao are no dependency of Orbit: their rows are skipped where the
packages are missing (`uv pip install nvidia-modelopt==0.47.0 torchao==0.18.0`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from fakes import packed_weights
from fakes.packed_weights import bits, ordinary_floats
from torch import Tensor

from orbit_runtime.quant import fp8, fp8_block, int4_asymmetric, mxfp4, nvfp4

BF16 = torch.bfloat16


def measured(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Share of values whose BF16 bits differ, and the largest relative difference, where both are finite."""
    both = ours.isfinite() & theirs.isfinite()
    share = (bits(ours)[both] != bits(theirs.to(BF16))[both]).float().mean().item()
    relative = ((ours.double() - theirs.double()).abs() / ours.double().abs().clamp(min=1e-300))[both & (ours != 0)]
    return share, relative.max().item()


def fp8_weight(shape: tuple[int, ...]) -> fp8.FP8Weight:
    return packed_weights.fp8(256, 256, ordinary_floats(*shape, seed=1))


def modelopt(name: str) -> Any:
    module = f"modelopt.torch.quantization.qtensor.{name}"
    return pytest.importorskip(module, reason="nvidia-modelopt 0.47.0 is not installed")


def by_modelopt_nvfp4(weight: nvfp4.NVFP4Weight, factor: Tensor) -> Tensor:
    tensor = modelopt("nvfp4_tensor").NVFP4QTensor(torch.Size(weight.shape), BF16, weight.qdata)
    return tensor.dequantize(BF16, scale=weight.scale, double_scale=factor, block_sizes={-1: 16})


def ct_nvfp4_by_modelopt() -> tuple[Tensor, Tensor]:
    weight = packed_weights.nvfp4(256, 256, 2688 / 0.37)
    return nvfp4.dequantize(weight), by_modelopt_nvfp4(weight, 1 / weight.global_scale[0])


def modelopt_nvfp4_by_modelopt() -> tuple[Tensor, Tensor]:
    weight = packed_weights.nvfp4(256, 256, 0.37 / 2688, "NVFP4ModelOpt")
    return nvfp4.dequantize(weight), by_modelopt_nvfp4(weight, weight.global_scale)


def modelopt_nvfp4_by_compressed_tensors() -> tuple[Tensor, Tensor]:
    """As compressed-tensors' converter makes of it: the factor becomes a divisor."""
    weight = packed_weights.nvfp4(256, 256, 0.37 / 2688, "NVFP4ModelOpt")
    converted = {"weight_packed": weight.qdata, "weight_scale": weight.scale}
    converted["weight_global_scale"] = 1 / weight.global_scale.view(1)
    arguments = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    return nvfp4.dequantize(weight), NVFP4PackedCompressor.decompress(converted, scheme)["weight"]


def nvfp4_by_code_times_scale_times_global() -> tuple[Tensor, Tensor]:
    weight = packed_weights.nvfp4(256, 256, 0.37 / 2688, "NVFP4ModelOpt")
    ones = nvfp4.NVFP4Weight(weight.qdata, weight.scale, torch.tensor(1.0), weight.layout)
    exact = nvfp4.dequantize(ones, torch.float32)  # 2 bits times 4 bits: no rounding yet
    return nvfp4.dequantize(weight), (exact * weight.global_scale).to(BF16)


def nvfp4_by_torchao() -> tuple[Tensor, Tensor]:
    reason = "torchao 0.18.0 is not installed"
    torchao = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason=reason)
    weight = packed_weights.nvfp4(256, 256, 0.37 / 2688, "NVFP4ModelOpt")
    theirs = torchao.NVFP4Tensor(weight.qdata, weight.scale, 16, BF16, per_tensor_scale=weight.global_scale)
    return nvfp4.dequantize(weight), theirs.dequantize(BF16)


def mxfp4_by_torchao() -> tuple[Tensor, Tensor]:
    reason = "torchao 0.18.0 is not installed"
    torchao = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason=reason)
    weight = packed_weights.mxfp4(256, 256)
    scale = weight.scale.view(torch.float8_e8m0fnu)
    return mxfp4.dequantize(weight), torchao.to_dtype(weight.qdata, scale, torch.float4_e2m1fn_x2, 32, BF16)


def mxfp4_by_modelopt() -> tuple[Tensor, Tensor]:
    weight = packed_weights.mxfp4(256, 256)
    tensor = modelopt("mxfp4_tensor").MXFP4QTensor(torch.Size(weight.shape), BF16, weight.qdata)
    return mxfp4.dequantize(weight), tensor.dequantize(BF16, scale=weight.scale, block_sizes={-1: 32})


def fp8_by_modelopt() -> tuple[Tensor, Tensor]:
    weight = fp8_weight((1,))
    tensor = modelopt("fp8_tensor").FP8QTensor(torch.Size(weight.shape), BF16, weight.qdata)
    return fp8.dequantize(weight), tensor.dequantize(BF16, scale=weight.scale)


def fp8_by_compressed_tensors() -> tuple[Tensor, Tensor]:
    weight = fp8_weight((256, 1))
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=8, type="float"))
    return fp8.dequantize(weight), FloatQuantizationCompressor.decompress(fp8.buffers(weight), scheme)["weight"].to(
        BF16
    )


def fp8_block_by_compressed_tensors() -> tuple[Tensor, Tensor]:
    weight = packed_weights.fp8_block(256, 256, ordinary_floats(2, 2, seed=2))
    reader = FP8BlockDequantizer(targets=["Linear"])
    return fp8_block.dequantize(weight), reader._create_dequantized_weight(weight.qdata, weight.scale)


def fp8_block_in_bf16() -> tuple[Tensor, Tensor]:
    weight = packed_weights.fp8_block(256, 256, ordinary_floats(2, 2, seed=2))
    repeated = weight.scale.to(BF16).repeat_interleave(128, 0).repeat_interleave(128, 1)
    return fp8_block.dequantize(weight), weight.qdata.to(BF16) * repeated


def awq_in_f16() -> tuple[Tensor, Tensor]:
    weight = packed_weights.int4_asymmetric(256, 256, 128, torch.float16)
    weight = int4_asymmetric.INT4AsymmetricWeight(
        weight.qdata, ordinary_floats(256, 2, seed=3).half(), weight.zero_point
    )
    parts = int4_asymmetric.to_checkpoint(weight)
    arguments = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=128)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    return int4_asymmetric.dequantize(weight), PackedQuantizationCompressor.decompress(parts, scheme)["weight"]


ROWS: list[tuple[str, Callable[[], tuple[Tensor, Tensor]], bool, str]] = [
    ("FP8 per row, compressed-tensors", fp8_by_compressed_tensors, True, "oracle"),
    ("FP8 per tensor, ModelOpt", fp8_by_modelopt, False, "rounds the F32 scale to BF16 before multiplying"),
    ("FP8 128x128, compressed-tensors", fp8_block_by_compressed_tensors, True, "same order as transformers"),
    ("FP8 128x128, multiplied in BF16", fp8_block_in_bf16, False, "rounds the F32 scale to BF16 before multiplying"),
    ("NVFP4 of ModelOpt, ModelOpt", modelopt_nvfp4_by_modelopt, True, "oracle"),
    ("NVFP4 of ModelOpt, torchao", nvfp4_by_torchao, True, "same order as ModelOpt"),
    ("NVFP4 of ModelOpt, by compressed-tensors", modelopt_nvfp4_by_compressed_tensors, False, "1/(1/x) is not x"),
    ("NVFP4 of compressed-tensors, by ModelOpt", ct_nvfp4_by_modelopt, False, "1/x rounds; then * for /"),
    ("NVFP4, (code * scale) * global", nvfp4_by_code_times_scale_times_global, False, "one fp32 rounding, not two"),
    ("MXFP4, ModelOpt", mxfp4_by_modelopt, True, "exact in any order"),
    ("MXFP4, torchao", mxfp4_by_torchao, True, "exact in any order"),
    ("AWQ, compressed-tensors in F16", awq_in_f16, False, "F16 keeps 3 bits more, which BF16 then drops"),
]


@pytest.mark.parametrize(("what", "read", "same", "why"), ROWS, ids=[row[0] for row in ROWS])
def test_other_code_differs_where_the_table_says_and_nowhere_else(
    what: str, read: Callable[[], tuple[Tensor, Tensor]], same: bool, why: str
) -> None:
    share, largest = measured(*read())
    print(f"{what:42} differ {share:8.4%}  largest relative difference {largest:.1e}  {why}")
    assert (share == 0) == same
    assert largest < 2**-7, "a rounding or two, never another value"
