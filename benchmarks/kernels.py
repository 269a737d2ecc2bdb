"""The kernels on a CUDA device: dequantising against the memory's bandwidth, products against the BF16 GEMM.

Without a device nothing is measured. Times are of one named card. "BF16 GEMM" is torch's, over a dense
weight of the same shape, so it is the price of not being quantised; ratios are its time over ours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Comparison, Measured, NotMeasured, compare, run, table

MEASURES = ("orbit_runtime/quant", "tests/fakes/kernel_weights.py")
LAYOUTS = ("INT4", "FP8", "FP8Block", "NVFP4", "MXFP4")
SHAPES = ((4096, 4096), (7168, 2048), (2048, 7168))
"""N, K: a square one, and the experts of a very large model."""
TOKENS = (256, 2048, 4096, 8192)
BANDWIDTH = {"B200": 7.672e12, "H200": 4.8e12, "H100": 3.35e12, "A100": 2.039e12, "RTX 4090": 1.008e12}
"""Bytes per second, from the makers' data sheets (the SXM form; A100 with 80 GB)."""
GEMM_SHARE, BANDWIDTH_SHARE = 0.9, 0.8
CALLS = 20


def timed(function: Callable[[], object]) -> Callable[[], None]:
    """The function `CALLS` times, until the device has finished."""

    def run() -> None:
        for _ in range(CALLS):
            function()
        torch.cuda.synchronize()

    return run


def dequantising(layout: str, repetitions: int) -> tuple[Comparison, float]:
    """Against copying as many bytes, and the bytes per second."""
    from fakes.kernel_weights import operands_of, ordinary

    from orbit_runtime.quant.formats import FORMATS
    from orbit_runtime.quant.kernels import launch

    weight = ordinary(layout, 8192, 8192)
    operands = operands_of(weight, "cuda")
    moved = FORMATS[layout].num_bytes(weight) + 2 * 8192 * 8192
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    row = compare(
        f"{layout} 8192x8192 to BF16",
        ("kernel", timed(lambda: launch.dequantize(operands))),
        ("copying as many bytes", timed(lambda: target.copy_(source))),
        repetitions=repetitions,
        target=BANDWIDTH_SHARE,
    )
    return row, moved * CALLS / row.median_a


def products(layout: str, shape: tuple[int, int], tokens: int, repetitions: int) -> list[Comparison]:
    from fakes.kernel_weights import operands_of, ordinary

    from orbit_runtime.quant.formats import FORMATS
    from orbit_runtime.quant.kernels.products import DequantizedProduct, FusedProduct
    from orbit_runtime.quant.linear import DENSE_BYTES_LIMIT

    rows, columns = shape
    weight = ordinary(layout, rows, columns)
    operands, dense = operands_of(weight, "cuda"), FORMATS[layout].dequantize(weight).cuda()
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    dy = torch.randn(tokens, rows, device="cuda").bfloat16()
    found = []
    for name, product in (
        ("fused", FusedProduct(operands.form)),
        ("dequantised", DequantizedProduct(operands.form, DENSE_BYTES_LIMIT["cuda"])),
    ):
        for way, ours, theirs in (
            ("forward", lambda p=product: p.forward(x, None, operands.tensors), lambda: x @ dense.t()),
            ("gradient", lambda p=product: p.input_gradient(dy, operands.tensors), lambda: dy @ dense),
        ):
            found.append(
                compare(
                    f"{layout} {rows}x{columns}, {tokens} tokens, {way}",
                    (name, timed(ours)),
                    ("BF16 GEMM", timed(theirs)),
                    repetitions=repetitions,
                    target=GEMM_SHARE if tokens >= 2048 else None,
                )
            )
    return found


def experts(layout: str, repetitions: int) -> Comparison:
    """64 experts, 8,192 tokens in all, against torch's grouped GEMM over dense experts."""
    from fakes.kernel_weights import ordinary, stack_on

    from orbit_runtime.quant.formats import FORMATS
    from orbit_runtime.quant.kernels.products import FusedGroupedProduct

    stack, operands = stack_on([ordinary(layout, 2048, 1024, seed % 4) for seed in range(64)], "cuda")
    dense = torch.stack([FORMATS[layout].dequantize(stack.expert(index)) for index in range(64)])
    offsets = (torch.arange(1, 65) * 128).to(torch.int32).cuda()
    x = torch.randn(8192, 1024, device="cuda").bfloat16()
    product = FusedGroupedProduct(operands.form)
    transposed: Tensor = dense.transpose(1, 2)
    return compare(
        f"{layout} 64 experts 2048x1024, 8192 tokens",
        ("fused", timed(lambda: product.forward(x, offsets, operands.tensors))),
        ("BF16 grouped GEMM", timed(lambda: torch.nn.functional.grouped_mm(x, transposed, offs=offsets))),
        repetitions=repetitions,
        target=GEMM_SHARE,
    )


def measure(options: argparse.Namespace) -> Measured:
    if not torch.cuda.is_available():
        raise NotMeasured("torch finds no CUDA device here")
    card = torch.cuda.get_device_name()
    nominal = next((rate for name, rate in BANDWIDTH.items() if name in card), None)
    rows, rates = [], {}
    for layout in LAYOUTS[:1] if options.smallest else LAYOUTS:
        row, rate = dequantising(layout, options.repetitions)
        rows.append(row)
        rates[layout] = {"bytes_per_second": rate, "share_of_data_sheet": rate / nominal if nominal else None}
        for shape in SHAPES[:1] if options.smallest else SHAPES:
            for tokens in TOKENS[:1] if options.smallest else TOKENS:
                rows += products(layout, shape, tokens, options.repetitions)
        rows.append(experts(layout, options.repetitions))
    print(f"{card}; times are of {CALLS} calls")
    print(table(rows))
    for layout, each in rates.items():
        print(f"dequantising {layout}: {each}")
    facts = {"card": card, "calls": CALLS, "torch": torch.__version__}
    return Measured(rows, {"dequantising": rates}, facts, variant=card.replace(" ", "_").lower())


if __name__ == "__main__":
    raise SystemExit(run(__file__, __doc__, measure))
