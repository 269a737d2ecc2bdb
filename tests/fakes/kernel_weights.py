"""A weight of every kind that kernels read, small, of awkward shape, with every code and scales of every magnitude.

Belongs here: making them and moving them to a device. Does not belong here: any expectation.
"""

from __future__ import annotations

import torch
from fakes import packed_weights

from orbit_runtime.quant import int4
from orbit_runtime.quant.experts import ExpertStack
from orbit_runtime.quant.formats import FORMATS, Weight, format_of
from orbit_runtime.quant.kernels.operands import Operands, build_operands

CASES = (
    "INT4-32", "INT4-128", "INT4-row", "INT4-24", "INT4Asymmetric-bf16", "INT4Asymmetric-f16", "INT4Asymmetric-f32",
    "FP8-rows", "FP8-bf16-rows", "FP8-tensor", "FP8Block", "FP8Block-bf16", "FP8BlockCT", "FP8BlockV4", "NVFP4",
    "NVFP4ModelOpt", "MXFP4", "MXFP4V4",
)  # fmt: skip
"""GPTQ and AWQ weights are `INT4Asymmetric` with F16 scales once they are read."""


def stack_experts(weights: list[Weight]) -> ExpertStack:
    """Copies every packed tensor once. The weights must have one layout, shape and group size."""
    formats = {format_of(weight) for weight in weights}
    assert len(formats) == 1, formats
    (name,) = formats
    buffers = [FORMATS[name].buffers(weight) for weight in weights]
    return ExpertStack(name, {key: torch.stack([each[key] for each in buffers]) for key in buffers[0]})


def adversarial(case: str, rows: int, columns: int) -> Weight:
    """Any finite scale, the largest and subnormal ones included; `columns` is a multiple of 384."""
    layout, _, variant = case.partition("-")
    floats = packed_weights.positive_floats
    if layout == "INT4":
        group = columns if variant == "row" else int(variant)
        codes = packed_weights.int4_asymmetric(rows, columns, group, torch.bfloat16)
        scale = floats(rows, columns // group, seed=3).to(torch.bfloat16).clamp(max=3e38)
        return int4.INT4Weight(codes.qdata, scale, (rows, columns), group)
    if layout == "INT4Asymmetric":
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[variant]
        return packed_weights.int4_asymmetric(rows, columns, 32, dtype)
    if layout == "FP8":
        shape = (1,) if variant == "tensor" else (rows, 1)
        scale = packed_weights.ordinary_floats(*shape, seed=4) if variant == "tensor" else floats(*shape, seed=4)
        return packed_weights.fp8(rows, columns, scale.bfloat16() if variant == "bf16-rows" else scale)
    if layout.startswith("FP8Block"):
        shape = (-(-rows // 128), -(-columns // 128))
        if layout == "FP8BlockV4":
            powers = (packed_weights.random_bytes(*shape, seed=5).int() % 255).to(torch.uint8)
            return packed_weights.fp8_block(rows, columns, powers.view(torch.float8_e8m0fnu), layout)
        scale = floats(*shape, seed=5)
        return packed_weights.fp8_block(rows, columns, scale.bfloat16() if variant == "bf16" else scale, layout)
    if layout.startswith("NVFP4"):
        return packed_weights.nvfp4(rows, columns, 2731.4 if layout == "NVFP4" else 3.7e-4, layout)
    return packed_weights.mxfp4(rows, columns, layout)


def ordinary(layout: str, rows: int, columns: int, seed: int = 0) -> Weight:
    """Quantised from a normal distribution: for products, whose sums should be of one magnitude."""
    arguments = (32,) if layout.startswith("INT4") else ()
    quantize = FORMATS[layout].quantize
    assert quantize is not None
    w = torch.randn(rows, columns, generator=packed_weights.generator(seed)) * 0.1 * (1 + seed)
    weight: Weight = quantize(w, *arguments)
    return weight


def operands_of(weight: Weight, device: str) -> Operands:
    layout = format_of(weight)
    found = build_operands(layout, [tensor.to(device) for tensor in FORMATS[layout].buffers(weight).values()])
    assert found is not None
    return found


def stack_on(weights: list[Weight], device: str) -> tuple[ExpertStack, Operands]:
    stack = stack_experts(weights)
    moved = ExpertStack(stack.format, {name: tensor.to(device) for name, tensor in stack.tensors.items()})
    found = build_operands(moved.format, tuple(moved.tensors.values()), stacked=True)
    assert found is not None
    return moved, found
