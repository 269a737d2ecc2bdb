"""The frozen INT4 linear layer against torchao's INT4 weight-only layer and bitsandbytes' NF4 one, in one process.

Needs both libraries: `make vendor-table` installs them into `.venv-vendors`, with the same torch; run it with that
Python. All compute in BF16 on a CPU with instructions for it, else in fp32 where they can: without them, products of
BF16 are far slower.

torchao's CPU kernel takes BF16 and has no backward. Its side here multiplies with its kernel, and its gradient is a
product with the weight that torchao dequantises: the minimum cost of a training step with it.
"""

from __future__ import annotations

import argparse
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.frozen_linear import forward_backward
from benchmarks.harness import Measured, compare, need_packages, product_seconds, run, table
from orbit_runtime.quant import int4
from orbit_runtime.quant.linear import FrozenLinear
from orbit_runtime.sides.machine import machine_facts

SIZE, ROWS, GROUP = 4096, 256, 32
MEASURES = ("orbit_runtime/quant",)


class TorchaoLinear(nn.Module):
    """Forward: its kernel in BF16, or dequantising plus a product in `dtype`. Backward: the latter."""

    def __init__(self, w: Tensor, dtype: torch.dtype, *, kernel: bool) -> None:
        from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor
        from torchao.quantization.quant_primitives import (
            MappingType,
            _choose_qparams_affine_tinygemm,
            _quantize_affine_tinygemm,
        )

        super().__init__()
        block, w = (1, GROUP), w.to(torch.bfloat16)
        self.packed = Int4OpaqueTensor.from_hp(w, list(block))
        self.scale, self.zero = _choose_qparams_affine_tinygemm(
            w, MappingType.ASYMMETRIC, block, torch.int32, 0, 15, 1e-6, None, torch.bfloat16
        )
        codes = _quantize_affine_tinygemm(w, block, self.scale, self.zero, torch.int32, 0, 15)
        self.codes, self.kernel, self.dtype = codes.to(torch.uint8), kernel, dtype

    def dequantized(self) -> Tensor:
        from torchao.quantization.quant_primitives import _dequantize_affine_tinygemm

        dense: Tensor = _dequantize_affine_tinygemm(
            self.codes, (1, GROUP), self.scale, self.zero, torch.uint8, 0, 15, output_dtype=self.dtype
        )
        return dense

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _TorchaoProduct.apply(x, self)
        return result


class _TorchaoProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: TorchaoLinear) -> Tensor:
        ctx.layer = layer
        if layer.kernel:
            return nn.functional.linear(x.to(torch.bfloat16), layer.packed).to(x.dtype)
        return nn.functional.linear(x, layer.dequantized())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dy @ ctx.layer.dequantized(), None


def nf4_linear(w: Tensor, dtype: torch.dtype) -> nn.Module:
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(*w.shape, bias=False, compute_dtype=dtype, quant_type="nf4")
    layer.weight = bitsandbytes.nn.Params4bit(w, requires_grad=False, quant_type="nf4")
    return layer.to("cpu")


def measure(options: argparse.Namespace) -> Measured:
    need_packages("torchao", "bitsandbytes", install="`make vendor-table` does so in .venv-vendors")
    torch.manual_seed(0)
    size = 256 if options.smallest else SIZE
    w = torch.randn(size, size) * 0.02
    packed = int4.quantize(w, GROUP)
    layer = FrozenLinear(packed)
    least = 2 * product_seconds(ROWS, w.shape, packed.qdata.nbytes + packed.scale.nbytes)
    dtype = torch.bfloat16 if machine_facts().multiplies_bf16 else torch.float32
    x, dy = torch.randn(ROWS, size).to(dtype).requires_grad_(), torch.randn(ROWS, size).to(dtype)
    others = {
        "torchao int4, its kernel": (TorchaoLinear(w, dtype, kernel=True), 1.5),
        "torchao int4, dequantised": (TorchaoLinear(w, dtype, kernel=False), 1.5),
        "bitsandbytes nf4": (nf4_linear(w, dtype), 1.2),
    }
    dense = w.to(dtype)
    exact = nn.functional.linear(x.detach(), dense)
    for name, (other, _) in others.items():
        error = ((other(x) - exact).norm() / exact.norm()).item()
        assert error < 0.15, f"{name} is not the same layer: {error}"
    rows = [
        compare(
            f"{size}x{size}, {ROWS} rows, forward + backward",
            ("frozen INT4", lambda: forward_backward(layer, x, dy)),
            (name, lambda other=other: forward_backward(other, x, dy)),
            repetitions=options.repetitions,
            target=target,
            least=(least, least),
        )
        for name, (other, target) in others.items()
    ]
    rows.append(
        compare(
            "the two products alone",
            ("frozen INT4", lambda: forward_backward(layer, x, dy)),
            ("dense", lambda: (nn.functional.linear(x.detach(), dense), dy @ dense)),
            repetitions=options.repetitions,
            least=(least, least),
        )
    )
    print(table(rows))
    versions = {name: metadata.version(name) for name in ("torch", "torchao", "bitsandbytes")}
    facts = {
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "dtype": str(dtype).removeprefix("torch."),
        "versions": versions,
    }
    return Measured(rows, facts=facts)


if __name__ == "__main__":
    raise SystemExit(run(__file__, __doc__, measure))
