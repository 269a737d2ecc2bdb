"""The kernels of one layout: dequantising against the memory's bandwidth, products against the BF16 GEMM.

"BF16 GEMM" is torch's, over a dense weight of the same shape, so it is the price of not being quantised; ratios are its
time over ours. At the sizes of decoding a product is one pass over the weight: the bytes a second say how near it is to
a copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict

import torch

from benchmarks.harness import ROOT, Comparison, compare
from orbit_runtime.model_info.gpus import find_gpu
from orbit_runtime.quant.formats import FORMATS
from orbit_runtime.quant.kernels import launch
from orbit_runtime.quant.kernels.products import DequantizedProduct, FusedGroupedProduct, FusedProduct
from orbit_runtime.quant.linear import DENSE_BYTES_LIMIT
from tools.gpu_proof.record import Record

sys.path.insert(0, str(ROOT / "tests"))

from fakes.kernel_weights import operands_of, ordinary, stack_on

SHAPES = ((4096, 4096), (7168, 2048), (2048, 7168))
"""N, K: a square one, and the experts of a very large model."""
DECODING, TRAINING = (1, 16, 64), (256, 2048, 4096, 8192)
"""Tokens."""
GEMM_SHARE, BANDWIDTH_SHARE = 0.9, 0.8
"""Targets, of training sizes from 2,048 tokens, and of dequantising."""
CALLS, REPETITIONS = 20, 5


def run(record: Record, *, layout: str) -> None:
    device = record.device
    bench = Bench(layout, device, *((1, 1) if record.is_tiny else (CALLS, REPETITIONS)))
    record.add("calls that a time is of", bench.calls)
    copied = 0.0
    for name, row, rate in bench.dequantising(128 if record.is_tiny else 8192):
        copied = max(copied, rate["copying, bytes a second"])
        record.add(name, asdict(row) | rate)
    card = find_gpu(record.content["card"])
    record.add("copying, share of the data sheet's bandwidth", copied / card.bandwidth if card and copied else None)
    for shape in ((64, 64),) if record.is_tiny else SHAPES:
        for tokens in (3,) if record.is_tiny else (*DECODING, *TRAINING):
            for name, row in bench.products(shape, tokens):
                speed = bench.weight_bytes(shape) * bench.calls / row.median_a
                share = {"weight, bytes a second": speed, "of copying": speed / copied} if tokens in DECODING else {}
                record.add(name, asdict(row) | share)
    experts = bench.experts(*((2, 32, 64, 8) if record.is_tiny else (64, 2048, 1024, 128)))
    record.add(experts.name, asdict(experts))


class Bench:
    """Times one layout's kernels on one device."""

    def __init__(self, layout: str, device: str, calls: int, repetitions: int) -> None:
        self.layout, self.device, self.calls, self.repetitions = layout, device, calls, repetitions

    def timed(self, function: Callable[[], object]) -> Callable[[], None]:
        """The function `calls` times, until the device has finished."""

        def work() -> None:
            for _ in range(self.calls):
                function()
            if self.device == "cuda":
                torch.cuda.synchronize()

        return work

    def weight_bytes(self, shape: tuple[int, int]) -> int:
        return FORMATS[self.layout].num_bytes(ordinary(self.layout, *shape))

    def dequantising(self, side: int) -> list[tuple[str, Comparison, dict[str, float]]]:
        """Against copying as many bytes, with the bytes a second of both."""
        weight = ordinary(self.layout, side, side)
        operands = operands_of(weight, self.device)
        moved = FORMATS[self.layout].num_bytes(weight) + 2 * side * side
        source = torch.empty(moved // 2, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        row = compare(
            f"{self.layout} {side}x{side} to BF16",
            ("kernel", self.timed(lambda: launch.dequantize(operands))),
            ("copying as many bytes", self.timed(lambda: target.copy_(source))),
            repetitions=self.repetitions,
            target=BANDWIDTH_SHARE,
        )
        rates = {
            "kernel, bytes a second": moved * self.calls / row.median_a,
            "copying, bytes a second": moved * self.calls / row.median_b,
        }
        return [(row.name, row, rates)]

    def products(self, shape: tuple[int, int], tokens: int) -> list[tuple[str, Comparison]]:
        rows, columns = shape
        weight = ordinary(self.layout, rows, columns)
        operands = operands_of(weight, self.device)
        dense = FORMATS[self.layout].dequantize(weight).to(self.device)
        x = torch.randn(tokens, columns, device=self.device).bfloat16()
        dy = torch.randn(tokens, rows, device=self.device).bfloat16()
        target = GEMM_SHARE if tokens >= 2048 else None
        found = []
        for kind, product in (
            ("fused", FusedProduct(operands.form)),
            ("dequantised", DequantizedProduct(operands.form, DENSE_BYTES_LIMIT["cuda"])),
        ):
            for way, ours, theirs in (
                ("forward", lambda p=product: p.forward(x, None, operands.tensors), lambda: x @ dense.t()),
                ("gradient", lambda p=product: p.input_gradient(dy, operands.tensors), lambda: dy @ dense),
            ):
                name = f"{self.layout} {rows}x{columns}, {tokens} tokens, {way}, {kind}"
                sides = (kind, self.timed(ours)), ("BF16 GEMM", self.timed(theirs))
                found.append((name, compare(name, *sides, repetitions=self.repetitions, target=target)))
        return found

    def experts(self, count: int, rows: int, columns: int, tokens: int) -> Comparison:
        """`tokens` each, against torch's grouped GEMM over dense experts."""
        weights = [ordinary(self.layout, rows, columns, seed % 4) for seed in range(count)]
        stack, operands = stack_on(weights, self.device)
        dense = torch.stack([FORMATS[self.layout].dequantize(stack.expert(index)) for index in range(count)])
        offsets = (torch.arange(1, count + 1) * tokens).to(torch.int32).to(self.device)
        x = torch.randn(count * tokens, columns, device=self.device).bfloat16()
        product, transposed = FusedGroupedProduct(operands.form), dense.transpose(1, 2)
        return compare(
            f"{self.layout} {count} experts {rows}x{columns}, {tokens} tokens each",
            ("fused", self.timed(lambda: product.forward(x, offsets, operands.tensors))),
            ("BF16 grouped GEMM", self.timed(lambda: torch.nn.functional.grouped_mm(x, transposed, offs=offsets))),
            repetitions=self.repetitions,
            target=GEMM_SHARE,
        )
