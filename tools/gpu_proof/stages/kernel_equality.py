"""Kernels against their twins, the codecs: dequantised weights to the bit, products by how far they are from fp32.

Belongs here: the numbers, layout by layout. Does not belong here: tests of single cases (`tests/gpu/test_kernels.py`).
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from benchmarks.harness import ROOT
from orbit_runtime.quant.formats import FORMATS, format_of
from orbit_runtime.quant.grouped import TorchGroupedProduct
from orbit_runtime.quant.kernels import launch
from orbit_runtime.quant.kernels.products import DequantizedProduct, FusedGroupedProduct, FusedProduct
from orbit_runtime.quant.linear import DENSE_BYTES_LIMIT
from tools.gpu_proof.record import Record, WrongResult

sys.path.insert(0, str(ROOT / "tests"))

from fakes.kernel_weights import CASES, adversarial, operands_of, ordinary, stack_on
from fakes.packed_weights import bits, generator

LAYOUTS = ("INT4", "INT4Asymmetric", "FP8", "FP8Block", "NVFP4", "NVFP4ModelOpt", "MXFP4")
SHAPES = ((2100, 3840), (7168, 2304), (129, 384))
"""Rows and columns: odd numbers of rows, the expert of a very large model, barely more than one tile."""
TINY_CASES = ("INT4-32", "INT4Asymmetric-f16", "NVFP4", "MXFP4")
"""Without FP8, of which the interpreter reads a NaN as 480."""
LIMIT = 3e-3
"""Of a product's relative error; rounding its operands to BF16 alone makes 1.6e-3."""


def run(record: Record) -> None:
    device = record.device
    shapes = ((40, 384),) if record.is_tiny else SHAPES
    cases = TINY_CASES if record.is_tiny else CASES
    wrong = []
    for case in cases:
        differing = {f"{height}x{width}": differing_values(case, height, width, device) for height, width in shapes}
        record.add(f"values of {case} that differ from the codec's", differing)
        wrong += [f"{case} {shape}" for shape, count in differing.items() if count]
    rows, columns, tokens = (48, 64, (3, 20)) if record.is_tiny else (2048, 4096, (1, 77, 2048, 5000))
    for layout in LAYOUTS[:1] if record.is_tiny else LAYOUTS:
        errors = product_errors(layout, rows, columns, tokens, device) | grouped_errors(layout, record.is_tiny, device)
        record.add(f"relative errors of products, {layout}", errors)
        wrong += [f"{layout} {name}" for name, error in errors.items() if not error < LIMIT]
    if wrong:
        raise WrongResult(f"not the codec's: {', '.join(wrong)}")


def differing_values(case: str, rows: int, columns: int, device: str) -> int:
    weight = adversarial(case, rows, columns)
    found = launch.dequantize(operands_of(weight, device))[0].cpu()
    return int((bits(found) != bits(FORMATS[format_of(weight)].dequantize(weight))).sum())


def product_errors(layout: str, rows: int, columns: int, tokens: tuple[int, ...], device: str) -> dict[str, float]:
    weight = ordinary(layout, rows, columns)
    operands = operands_of(weight, device)
    w = FORMATS[format_of(weight)].dequantize(weight, torch.float32).to(device)
    found = {}
    for name, product in (
        ("fused", FusedProduct(operands.form)),
        ("dequantised", DequantizedProduct(operands.form, DENSE_BYTES_LIMIT["cuda"])),
    ):
        for count in tokens:
            x, dy = normal(count, columns, 1, device), normal(count, rows, 2, device)
            found[f"{name}, {count} tokens"] = relative(product.forward(x, None, operands.tensors), x.float() @ w.t())
            found[f"{name}, {count} tokens, gradient"] = relative(
                product.input_gradient(dy, operands.tensors), dy.float() @ w
            )
    return found


def grouped_errors(layout: str, tiny: bool, device: str) -> dict[str, float]:
    """Experts with 0, 1, 4, 9, … tokens."""
    experts, rows, columns = (3, 32, 64) if tiny else (24, 512, 768)
    stack, operands = stack_on([ordinary(layout, rows, columns, seed) for seed in range(experts)], device)
    counts = torch.arange(experts).pow(2)
    offsets = counts.cumsum(0).to(torch.int32).to(device)
    x, dy = normal(int(counts.sum()), columns, 1, device), normal(int(counts.sum()), rows, 2, device)
    packed, product = tuple(stack.tensors.values()), FusedGroupedProduct(operands.form)
    twin = TorchGroupedProduct(layout, rows, columns, None)
    return {
        "experts": relative(product.forward(x, offsets, operands.tensors), twin.forward(x.float(), offsets, packed)),
        "experts, gradient": relative(
            product.input_gradient(dy, offsets, operands.tensors), twin.input_gradient(dy.float(), offsets, packed)
        ),
    }


def normal(rows: int, columns: int, seed: int, device: str) -> Tensor:
    return torch.randn(rows, columns, generator=generator(seed)).bfloat16().to(device)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())
