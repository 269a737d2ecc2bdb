"""The frozen INT4 linear layer against its twins in plain torch: time, and bytes saved for the backward pass.

The twin dequantises the whole weight with torch operations and multiplies; autograd saves the dense weight. The strict
twin uses our own codec, so that only the layer is compared. Saved bytes are those that autograd's hooks see.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Comparison, Measured, compare, product_seconds, run, table
from orbit_runtime.quant import bf16, int4
from orbit_runtime.quant.linear import FrozenLinear

MEASURES = ("orbit_runtime/quant",)


def plain_dequantize(weight: int4.INT4Weight) -> Tensor:
    """Reads like the format's definition."""
    codes = weight.qdata.view(torch.uint8)
    q = torch.stack((codes & 15, codes >> 4), -1).view(*weight.shape).to(torch.int8) - 8
    grouped = q.view(weight.shape[0], -1, weight.block_size).to(torch.float32)
    return (grouped * weight.scale.to(torch.float32).unsqueeze(-1)).to(torch.bfloat16).view(weight.shape)


def plain_twin(weight: int4.INT4Weight, x: Tensor) -> Tensor:
    return nn.functional.linear(x, plain_dequantize(weight).to(x.dtype))


def strict_twin(weight: int4.INT4Weight, x: Tensor) -> Tensor:
    return nn.functional.linear(x, int4.dequantize(weight, x.dtype))


def saved_bytes(function: object, x: Tensor) -> int:
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(x)  # type: ignore[operator]
    return sum(saved.values())


def forward_backward(function: object, x: Tensor, dy: Tensor) -> None:
    x.grad = None
    function(x).backward(dy)  # type: ignore[operator]


def measure(options: argparse.Namespace) -> Measured:
    torch.manual_seed(0)
    size = 128 if options.smallest else 4096
    weight = int4.quantize(torch.randn(size, size) * 0.02, 32)
    layer = FrozenLinear(weight)
    x, dy = torch.randn(256, size, requires_grad=True), torch.randn(256, size)
    twins = {"plain torch": lambda v: plain_twin(weight, v), "our codec, whole": lambda v: strict_twin(weight, v)}
    torch.testing.assert_close(layer(x), twins["plain torch"](x), rtol=1e-4, atol=1e-4)
    assert torch.equal(plain_dequantize(weight).view(torch.int16), int4.dequantize(weight).view(torch.int16))

    num_bytes = weight.qdata.nbytes + weight.scale.nbytes
    least = 2 * product_seconds(len(x), weight.shape, num_bytes)
    rows: list[Comparison] = [
        compare(
            f"INT4 {size}x{size}, 256 rows, forward + backward",
            ("frozen", lambda: forward_backward(layer, x, dy)),
            (label, lambda twin=twin: forward_backward(twin, x, dy)),
            repetitions=options.repetitions,
            target=1.0,
            least=(least, least),
        )
        for label, twin in twins.items()
    ]
    rows.append(
        compare(
            f"INT4 {size}x{size} to BF16",
            ("codec", lambda: int4.dequantize(weight)),
            ("plain torch", lambda: plain_dequantize(weight)),
            repetitions=options.repetitions,
        )
    )
    rows += small(options.repetitions, calls=5 if options.smallest else 500)
    ours, theirs = saved_bytes(layer, x), {name: saved_bytes(twin, x) for name, twin in twins.items()}
    print(table(rows))
    print(
        f"saved for backward: {ours:,} bytes; twins {theirs}; share of the smallest {ours / min(theirs.values()):.3f}"
    )
    figures = {"saved_bytes": ours, "saved_bytes_of_twins": theirs}
    return Measured(rows, figures, {"threads": torch.get_num_threads(), "torch": torch.__version__})


def small(repetitions: int, calls: int) -> list[Comparison]:
    """A layer of the shipped model in a decode step: 64 rows, 128 features."""
    weight = int4.quantize(torch.randn(128, 128) * 0.1, 32)
    dense, v = int4.dequantize(weight, torch.float32), torch.randn(64, 128)
    rounded = bf16.quantize(dense)
    least = product_seconds(len(v), weight.shape, weight.qdata.nbytes)
    rows = []
    with torch.no_grad():
        for name, layer in (("INT4", FrozenLinear(weight)), ("BF16", FrozenLinear(rounded))):
            rows.append(
                compare(
                    f"{name} 128x128, 64 rows, decoding",
                    ("frozen", lambda layer=layer: layer(v)),
                    ("dense fp32 matmul alone", lambda: nn.functional.linear(v, dense)),
                    repetitions=repetitions,
                    calls=calls,
                    least=(least, least),
                )
            )
    return rows


if __name__ == "__main__":
    raise SystemExit(run(__file__, __doc__, measure))
