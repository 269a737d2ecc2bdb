"""Other libraries' own code on the bytes that our codecs read: one row each, with the cause of any difference.

Belongs here: calling their code, and comparing. Does not belong here: the page (`page`), our arithmetic (`quant`).

`measure` runs the rows whose library is installed. Inputs are fixed, so a row gives the same figures everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from orbit_runtime.quant import awq, fp8, fp8_block, int4, int4_asymmetric, mxfp4, nvfp4
from orbit_runtime.quant.formats import FORMATS, Weight, format_of
from tests.fakes import packed_weights
from tests.fakes.packed_weights import bits, ordinary_floats

BF16 = torch.bfloat16
Pair = tuple[Tensor, Tensor]
ORACLE = "the oracle"
ROUNDED_SCALE = "rounds the F32 scale to BF16 before it multiplies"
IN_F16 = "multiplies in F16; rounding that to BF16 is a second rounding"
RECIPROCAL = "takes the global's reciprocal, which rounds, and then multiplies where it should divide, or the reverse"


@dataclass(frozen=True)
class Row:
    """One library on one layout."""

    layout: str
    library: str
    """As the package index has it; empty: no library, an order of operations that is met."""
    what: str
    read: Callable[[], Iterable[Pair]]
    """Pairs of (ours, theirs), over all of which is counted."""
    why: str

    @property
    def name(self) -> str:
        return f"{self.layout}: {self.what}"


@dataclass(frozen=True)
class Measured:
    """Over values that are finite on both sides; elsewhere both must be the same infinity, or NaN."""

    values: int
    differing: float
    """Share whose BF16 bits differ."""
    signs_of_zero: float
    """Share that differs as 0.0 from -0.0 and no more."""
    largest: float
    """Relative difference."""


def measure(row: Row) -> Measured:
    values = differing = signs = 0
    largest = 0.0
    for ours, read in row.read():
        theirs = read.to(BF16)
        both = ours.isfinite() & theirs.isfinite()
        if not torch.equal(bits(ours[~both]), bits(theirs[~both])):
            return Measured(ours.numel(), 1.0, 0.0, float("inf"))
        x, y = ours[both], theirs[both]
        unlike = bits(x) != bits(y)
        values += ours.numel()
        differing += int(unlike.sum())
        signs += int((unlike & (x == y)).sum())
        gap = (x.double() - y.double()).abs() / torch.maximum(x.double().abs(), y.double().abs()).clamp(min=1e-300)
        largest = max(largest, gap.max().item())
    return Measured(values, differing / values, signs / values, largest)


def dense(weight: Weight) -> Tensor:
    values: Tensor = FORMATS[format_of(weight)].dequantize(weight)
    return values


def scheme(**weights: Any) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


# INT4 ---------------------------------------------------------------------------------------------------------------


def int4_weight(group: int = 32) -> int4.INT4Weight:
    codes = (packed_weights.random_bytes(256, 256, seed=31).int() % 16 - 8).to(torch.int8)
    scale = ordinary_floats(256, 256 // group, seed=32).to(BF16)
    return int4.INT4Weight(int4.pack(codes), scale, (256, 256), group)


def int4_state(weight: int4.INT4Weight) -> dict[str, Tensor]:
    return int4.buffers(weight) | {"weight_shape": torch.tensor(weight.shape)}


def int4_compressed_tensors() -> Iterable[Pair]:
    for group in (32, 128):
        weight = int4_weight(group)
        arguments = scheme(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
        yield dense(weight), PackedQuantizationCompressor.decompress(int4_state(weight), arguments)["weight"]


def int4_torchao() -> Iterable[Pair]:
    """The values its CPU kernel multiplies by: its product with the identity."""
    from torchao.prototype.quantization.int4.int4_opaque_tensor import pack_tinygemm_scales_and_zeros

    weight = int4_weight()
    codes = int4.unpack(weight.qdata).to(torch.int32) + int4.ZERO_CODE
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    zeros = pack_tinygemm_scales_and_zeros(weight.scale, torch.zeros_like(weight.scale), BF16)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu(torch.eye(256, dtype=BF16), packed, 32, zeros)
    yield dense(weight), product.t()


def asymmetric_compressed_tensors() -> Iterable[Pair]:
    for group in (32, 128):
        weight = packed_weights.int4_asymmetric(250, 256, group, BF16)
        arguments = scheme(num_bits=4, type="int", symmetric=False, strategy="group", group_size=group)
        state = int4_asymmetric.to_checkpoint(weight)
        yield dense(weight), PackedQuantizationCompressor.decompress(state, arguments)["weight"]


def gptq_tensors(rows: int = 128, columns: int = 256, group: int = 128) -> dict[str, Tensor]:
    """Every code and zero point, 15 among them, which version 1 stores for 0."""
    return {
        "m.qweight": packed_weights.random_bytes(columns // 8, rows * 4, seed=33).view(torch.int32),
        "m.qzeros": packed_weights.random_bytes(columns // group, rows // 2, seed=34).view(torch.int32),
        "m.scales": ordinary_floats(columns // group, rows, seed=35).half(),
        "m.g_idx": (torch.arange(columns) // group).int(),
    }


def gptq_model(version: str, dtype: torch.dtype) -> Iterable[Pair]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    tensors = gptq_tensors()
    layer = TorchLinear(4, 128, sym=False, desc_act=False, in_features=256, out_features=128)
    for name in ("qweight", "qzeros", "g_idx"):
        getattr(layer, name).data = tensors[f"m.{name}"].clone()
    layer.scales.data = tensors["m.scales"].to(dtype)
    if version == "GPTQ":
        convert_gptq_v1_to_v2_format_module(layer, 4, torch.int32)
    layer.post_init()
    yield dense(FORMATS[version].from_checkpoint(tensors, "m")), layer.dequantize_weight().t()


def awq_tensors() -> dict[str, Tensor]:
    return {
        "m.qweight": packed_weights.random_bytes(256, 64, seed=36).view(torch.int32),
        "m.qzeros": packed_weights.random_bytes(2, 64, seed=37).view(torch.int32),
        "m.scales": ordinary_floats(2, 128, seed=38).half(),
    }


def awq_gptqmodel(dtype: torch.dtype) -> Iterable[Pair]:
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    tensors = awq_tensors()
    values = dequantize_gemm(tensors["m.qweight"], tensors["m.qzeros"], tensors["m.scales"].to(dtype), 4, 128)
    yield dense(awq.from_checkpoint(tensors, "m")), values.t()


def awq_compressed_tensors() -> Iterable[Pair]:
    tensors = awq_tensors()
    converted = AutoAWQConverter(group_size=128).process(dict(tensors))
    state = {name.removeprefix("m."): tensor for name, tensor in converted.items()}
    arguments = scheme(num_bits=4, type="int", symmetric=False, strategy="group", group_size=128)
    yield dense(awq.from_checkpoint(tensors, "m")), PackedQuantizationCompressor.decompress(state, arguments)["weight"]


# FP8 ----------------------------------------------------------------------------------------------------------------


def fp8_weights() -> Iterable[fp8.FP8Weight]:
    for shape in ((256, 1), (1,)):
        yield packed_weights.fp8(256, 256, ordinary_floats(*shape, seed=1))


def fp8_compressed_tensors() -> Iterable[Pair]:
    for weight in fp8_weights():
        strategy = "tensor" if weight.per_tensor else "channel"
        arguments = scheme(num_bits=8, type="float", strategy=strategy)
        yield dense(weight), FloatQuantizationCompressor.decompress(fp8.buffers(weight), arguments)["weight"]


def fp8_modelopt() -> Iterable[Pair]:
    from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor

    for weight in fp8_weights():
        tensor = FP8QTensor(torch.Size(weight.shape), BF16, weight.qdata)
        yield dense(weight), tensor.dequantize(BF16, scale=weight.scale)


def torchao_float8(qdata: Tensor, scale: Tensor) -> Tensor:
    from torchao.quantization import Float8Tensor

    values: Tensor = Float8Tensor(qdata, scale, dtype=BF16).dequantize()
    return values


def fp8_torchao() -> Iterable[Pair]:
    for weight in fp8_weights():
        yield dense(weight), torchao_float8(weight.qdata, weight.scale.view(-1, 1))


def block_weight(layout: str = "FP8Block") -> fp8_block.FP8BlockWeight:
    scale = ordinary_floats(2, 2, seed=2)
    return packed_weights.fp8_block(256, 256, scale.to(torch.float8_e8m0fnu) if "V4" in layout else scale, layout)


def block_transformers(layout: str = "FP8Block") -> Iterable[Pair]:
    weight = block_weight(layout)
    yield dense(weight), Fp8Dequantize(None)._dequantize_one(weight.qdata, weight.scale, output_dtype=BF16)


def block_compressed_tensors() -> Iterable[Pair]:
    weight = block_weight("FP8BlockCT")
    yield dense(weight), FP8BlockDequantizer(targets=["Linear"])._create_dequantized_weight(weight.qdata, weight.scale)


def block_torchao() -> Iterable[Pair]:
    weight = block_weight()
    yield dense(weight), torchao_float8(weight.qdata, weight.scale)


def block_in_bf16() -> Iterable[Pair]:
    weight = block_weight()
    repeated = weight.scale.to(BF16).repeat_interleave(128, 0).repeat_interleave(128, 1)
    yield dense(weight), weight.qdata.to(BF16) * repeated


# NVFP4 --------------------------------------------------------------------------------------------------------------


@functools.cache
def edge_globals(layout: str) -> Tensor:
    """20 ordinary globals, and 80 under which the order of operations decides a BF16 value somewhere.

    Such a value lies within an fp32 rounding of the middle between two BF16 numbers: random ones hardly ever do.
    """
    drawn = 1 / ordinary_floats(1 << 20, seed=4)
    drawn = drawn if layout == "NVFP4" else 1 / drawn
    code, found = 1.5, [drawn[:20]]
    for mantissa in range(8, 16):
        scale = torch.tensor(mantissa / 8)
        ours = scale / drawn if layout == "NVFP4" else scale * drawn
        inverse = scale * (1 / drawn) if layout == "NVFP4" else scale / (1 / drawn)
        exact = code * scale
        once = exact / drawn if layout == "NVFP4" else exact * drawn
        for other in (code * inverse, once):
            found.append(drawn[(code * ours).to(BF16) != other.to(BF16)][:5])
    return torch.cat(found)


def nvfp4_weights(layout: str) -> Iterable[nvfp4.NVFP4Weight]:
    """Every code times every scale, negative ones too, under `edge_globals`."""
    low = torch.arange(0, 16, 2, dtype=torch.uint8)
    qdata = (low | ((low + 1) << 4)).expand(252, 8).contiguous()
    positive = torch.arange(1, 0x7F, dtype=torch.uint8)
    scale = torch.cat((positive, positive | 0x80)).view(-1, 1).view(torch.float8_e4m3fn)
    for global_scale in edge_globals(layout):
        yield nvfp4.NVFP4Weight(qdata, scale, global_scale.view(1 if layout == "NVFP4" else ()), layout)


def by_compressed_tensors(weight: nvfp4.NVFP4Weight, divisor: Tensor) -> Tensor:
    state = {"weight_packed": weight.qdata, "weight_scale": weight.scale, "weight_global_scale": divisor.view(1)}
    arguments = scheme(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    values: Tensor = NVFP4PackedCompressor.decompress(state, arguments)["weight"]
    return values


def by_modelopt(weight: nvfp4.NVFP4Weight, factor: Tensor) -> Tensor:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    tensor = NVFP4QTensor(torch.Size(weight.shape), BF16, weight.qdata)
    values: Tensor = tensor.dequantize(BF16, scale=weight.scale, double_scale=factor, block_sizes={-1: 16})
    return values


def by_torchao(weight: nvfp4.NVFP4Weight, factor: Tensor) -> Tensor:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    tensor = NVFP4Tensor(weight.qdata, weight.scale, 16, BF16, per_tensor_scale=factor)
    values: Tensor = tensor.dequantize(BF16)
    return values


def in_one_product(weight: nvfp4.NVFP4Weight, factor: Tensor) -> Tensor:
    """(code · scale) · global: the first product is exact."""
    ones = nvfp4.NVFP4Weight(weight.qdata, weight.scale, torch.tensor(1.0), "NVFP4ModelOpt")
    return nvfp4.dequantize(ones, torch.float32) * factor


def nvfp4_rows(layout: str, read: Callable[[nvfp4.NVFP4Weight, Tensor], Tensor], *, inverse: bool) -> Iterable[Pair]:
    for weight in nvfp4_weights(layout):
        given = weight.global_scale.reshape(())
        yield dense(weight), read(weight, 1 / given if inverse else given)


# MXFP4 --------------------------------------------------------------------------------------------------------------


def mxfp4_compressed_tensors() -> Iterable[Pair]:
    weight = packed_weights.mxfp4(256, 256)
    arguments = scheme(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
    yield dense(weight), MXFP4PackedCompressor.decompress(mxfp4.buffers(weight), arguments)["weight"]


def mxfp4_transformers() -> Iterable[Pair]:
    weight = packed_weights.mxfp4(256, 256)
    tensors = {"e.g_blocks": weight.qdata.view(4, 64, 8, 16), "e.g_scales": weight.scale.view(4, 64, 8)}
    values = _convert_moe_packed_tensors(tensors["e.g_blocks"], tensors["e.g_scales"]).transpose(1, 2)
    yield dense(mxfp4.from_checkpoint(tensors, "e.g", "MXFP4GptOss")), values.reshape(256, 256)


def mxfp4_v4_transformers() -> Iterable[Pair]:
    weight = packed_weights.mxfp4(256, 256, "MXFP4V4")
    yield dense(weight), Fp8Dequantize(None)._dequantize_one(weight.qdata, weight.scale, output_dtype=BF16)


def mxfp4_modelopt() -> Iterable[Pair]:
    from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor

    weight = packed_weights.mxfp4(256, 256)
    tensor = MXFP4QTensor(torch.Size(weight.shape), BF16, weight.qdata)
    yield dense(weight), tensor.dequantize(BF16, scale=weight.scale, block_sizes={-1: 32})


def mxfp4_torchao() -> Iterable[Pair]:
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    weight = packed_weights.mxfp4(256, 256)
    scale = weight.scale.view(torch.float8_e8m0fnu)
    yield dense(weight), to_dtype(weight.qdata, scale, torch.float4_e2m1fn_x2, 32, BF16)


CT, HF, AO = "compressed-tensors", "transformers", "torchao"
MODELOPT, GPTQ = "nvidia-modelopt", "gptqmodel"
IMPORTS = {AO: "torchao", MODELOPT: "modelopt", GPTQ: "gptqmodel"}
"""Of libraries that no extra of Orbit installs."""


def _nvfp4(layout: str, library: str, read: Callable[..., Tensor], why: str, *, inverse: bool = False) -> Row:
    return Row(layout, library, library, lambda: nvfp4_rows(layout, read, inverse=inverse), why)


ROWS: tuple[Row, ...] = (
    Row("INT4", CT, CT, int4_compressed_tensors, ORACLE),
    Row("INT4", AO, AO + ", CPU kernel", int4_torchao, "the same order"),
    Row("INT4Asymmetric", CT, CT, asymmetric_compressed_tensors, ORACLE),
    Row("GPTQ", GPTQ, GPTQ + ", F32 scales", lambda: gptq_model("GPTQ", torch.float32), ORACLE),
    Row("GPTQ", GPTQ, GPTQ + ", F16 scales", lambda: gptq_model("GPTQ", torch.float16), IN_F16),
    Row("GPTQv2", GPTQ, GPTQ + ", F32 scales", lambda: gptq_model("GPTQv2", torch.float32), ORACLE),
    Row("AWQ", GPTQ, GPTQ + ", F32 scales", lambda: awq_gptqmodel(torch.float32), ORACLE),
    Row("AWQ", CT, CT + ", converted", awq_compressed_tensors, IN_F16),
    Row("FP8", CT, CT, fp8_compressed_tensors, ORACLE),
    Row("FP8", MODELOPT, MODELOPT, fp8_modelopt, ROUNDED_SCALE),
    Row("FP8", AO, AO, fp8_torchao, "the same order"),
    Row("FP8Block", HF, HF, block_transformers, ORACLE),
    Row("FP8Block", AO, AO, block_torchao, "the same order"),
    Row("FP8Block", "", "any code that multiplies in BF16", block_in_bf16, ROUNDED_SCALE),
    Row("FP8BlockCT", CT, CT, block_compressed_tensors, ORACLE),
    Row("FP8BlockV4", HF, HF, lambda: block_transformers("FP8BlockV4"), ORACLE),
    _nvfp4("NVFP4", CT, by_compressed_tensors, ORACLE),
    _nvfp4("NVFP4", MODELOPT, by_modelopt, RECIPROCAL + "; and makes +0 of the code for -0", inverse=True),
    _nvfp4("NVFP4", AO, by_torchao, RECIPROCAL, inverse=True),
    _nvfp4("NVFP4ModelOpt", AO, by_torchao, ORACLE),
    _nvfp4("NVFP4ModelOpt", MODELOPT, by_modelopt, "makes +0 of the code for -0; every other bit is the same"),
    _nvfp4("NVFP4ModelOpt", CT, by_compressed_tensors, RECIPROCAL, inverse=True),
    Row(
        "NVFP4ModelOpt", "", "any code that forms (code * scale) * global",
        lambda: nvfp4_rows("NVFP4ModelOpt", in_one_product, inverse=False), "rounds once in fp32, not twice",
    ),
    Row("MXFP4", CT, CT, mxfp4_compressed_tensors, ORACLE),
    Row("MXFP4", MODELOPT, MODELOPT, mxfp4_modelopt, "exact in any order"),
    Row("MXFP4", AO, AO, mxfp4_torchao, "exact in any order"),
    Row("MXFP4GptOss", HF, HF, mxfp4_transformers, ORACLE),
    Row("MXFP4V4", HF, HF, mxfp4_v4_transformers, ORACLE),
)  # fmt: skip
