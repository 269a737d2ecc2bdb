"""Activations rounded as a W8A8 or W4A4 engine rounds them, so that the trainer multiplies by the same numbers.

`spec.model.activationPrecision` enables it for the linears of that format. The gradient passes straight through: it
is that of the unrounded input (Bengio et al. 2013, arXiv 1308.3432), using the weight's dequantised values.

| activations | weights | scale of x |
|---|---|---|
| `FP8` | per row or tensor | the checkpoint's `input_scale` where it has one, else per token: `amax / 448` |
| `FP8` | blocks of 128 | per token and 128 columns: `amax / 448` |
| `NVFP4` | NVFP4 | E4M3 per 16 columns, relative to the checkpoint's global scale, or, without one, to the token's |

Order of operations: that of compressed-tensors, so codes are bit-identical to its own: `q = round(clamp(x / s))`.
An engine that multiplies by a reciprocal instead rounds a few values near a tie to the neighbouring code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from orbit_runtime.quant import e2m1
from orbit_runtime.quant.fp8_block import MAX as E4M3_MAX

ActivationPrecision = Literal["WeightOnly", "FP8", "NVFP4"]
BLOCK = 128
GROUP = 16
E4M3_EPSILON = 0.125
"""compressed-tensors' scale for a group of 16 that is all zeros or too small for E4M3."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a linear's input is rounded: per token, or with a static scale, a tensor of the layer."""

    kind: Literal["FP8Token", "FP8Block", "FP8Static", "NVFP4Token", "NVFP4Divide", "NVFP4Multiply"]

    @property
    def is_static(self) -> bool:
        return self.kind in ("FP8Static", "NVFP4Divide", "NVFP4Multiply")

    def __call__(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Values in x's dtype, and the fp32 factor per token by which the product must still be multiplied.

        The two are kept separate because codes are exact in BF16, and codes times an fp32 scale are not.
        """
        if self.kind == "FP8Block":
            return _fp8_blocks(x), None
        if self.kind == "FP8Token":
            scale = _nonzero(x.float().abs().amax(-1, keepdim=True) / E4M3_MAX)
        assert scale is not None or self.kind == "NVFP4Token", self.kind
        if self.kind in ("FP8Token", "FP8Static"):
            assert scale is not None
            return _e4m3(x.float() / scale.float()).to(x.dtype), scale.float()
        return _nvfp4(x, scale, self.kind)


class ActivationProduct(Protocol):
    """A product with a rounded input; the same interface as in `linear`."""

    def forward(self, x: Tensor, bias: Tensor | None, packed: Sequence[Tensor]) -> Tensor: ...

    def input_gradient(self, dy: Tensor, packed: Sequence[Tensor]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class RoundedProduct:
    """Wraps another product and rounds its input. A static scale is the last of the packed tensors."""

    inner: ActivationProduct
    rounding: Rounding

    def forward(self, x: Tensor, bias: Tensor | None, packed: Sequence[Tensor]) -> Tensor:
        packed, scale = (packed[:-1], packed[-1]) if self.rounding.is_static else (packed, None)
        values, factor = self.rounding(x, scale)
        if factor is None:
            return self.inner.forward(values, bias, packed)
        return scaled(self.inner.forward(values, None, packed), factor, bias)

    def input_gradient(self, dy: Tensor, packed: Sequence[Tensor]) -> Tensor:
        return self.inner.input_gradient(dy, packed[:-1] if self.rounding.is_static else packed)


def scaled(y: Tensor, factor: Tensor, bias: Tensor | None) -> Tensor:
    """`y * factor + bias` in fp32, rounded to y's dtype."""
    y32 = y.float() * factor
    return (y32 if bias is None else y32 + bias.float()).to(y.dtype)


def build_rounding(precision: ActivationPrecision, layout: str, has_scale: bool) -> Rounding | None:
    """The rounding before a linear of this layout (a key of `formats.FORMATS`); None if its x is not rounded."""
    if precision == "FP8" and layout.startswith("FP8"):
        if layout.startswith("FP8Block"):
            return Rounding("FP8Block")
        return Rounding("FP8Static" if has_scale else "FP8Token")
    if precision == "NVFP4" and layout.startswith("NVFP4"):
        if not has_scale:
            return Rounding("NVFP4Token")
        return Rounding("NVFP4Divide" if layout == "NVFP4" else "NVFP4Multiply")
    return None


def scale_name(precision: ActivationPrecision, layout: str) -> str:
    """Name in files of the static scale of a linear's input, relative to the module."""
    return "input_global_scale" if (precision, layout) == ("NVFP4", "NVFP4") else "input_scale"


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def _nonzero(scale: Tensor) -> Tensor:
    """The scale, or 1 where it is 0: any scale is valid for a token of zeros."""
    return torch.where(scale == 0, torch.finfo(torch.float32).eps, scale)


def _fp8_blocks(x: Tensor) -> Tensor:
    columns = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = _nonzero(padded.abs().amax(-1, keepdim=True) / E4M3_MAX)
    return (_e4m3(padded / scale) * scale).flatten(-2)[..., :columns].to(x.dtype)


def _nvfp4(x: Tensor, scale: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    blocks = x.float().unflatten(-1, (-1, GROUP))
    amax = blocks.abs().amax(-1)
    if kind == "NVFP4Token":
        largest = amax.amax(-1, keepdim=True)
        divisor = torch.where(largest == 0, 1.0, e2m1.MAX * E4M3_MAX / largest)
    else:
        assert scale is not None
        divisor = scale.float() if kind == "NVFP4Divide" else 1.0 / scale.float()
    local = (divisor * (amax / e2m1.MAX)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
    local = torch.where(local == 0, E4M3_EPSILON, local).unsqueeze(-1)
    quotient = blocks / (local / divisor.unsqueeze(-1))
    codes = torch.tensor(e2m1.VALUES, device=x.device)[e2m1.encode(quotient).long()]
    return (codes * local).flatten(-2).to(x.dtype), 1.0 / divisor
