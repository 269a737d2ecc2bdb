"""The one place that decides how to multiply by a packed weight, from device, dtype, layout and number of tokens.

| path | what it does |
|---|---|
| `Torch` | the codec, then a torch matmul: the twin, the only path on a CPU and whenever no kernel applies |
| `Dequantize` | a kernel writes BF16 by runs of rows, then a torch matmul |
| `Fused` | a kernel dequantises in registers and multiplies |
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
import sysconfig
from typing import Literal, get_args

import torch

from orbit_runtime.errors import UsageError
from orbit_runtime.quant.kernels.operands import KINDS

VARIABLE = "ORBIT_KERNELS"
Path = Literal["Torch", "Dequantize", "Fused"]
DEQUANTIZE_FROM = 4096
"""Number of tokens from which writing a dense weight first is faster. Calculated for an H200, not measured: writing and
reading 4 bytes per element takes as long as the product with 360 tokens, 9 % of 4,096; fused, every tile of at most
256 tokens dequantises again, at about a third of the cost of its products if nothing hides it."""
MINIMUM_CAPABILITY = {"INT4": (8, 0), "INT4Asymmetric": (8, 0), "MXFP4": (8, 0)}
E4M3_CAPABILITY = (8, 9)
"""Earlier devices have no instruction for E4M3 (FP8's codes, NVFP4's scales)."""

_log = logging.getLogger(__name__)


def select_path(
    layout: str, device: torch.device, dtype: torch.dtype, num_tokens: int, *, grouped: bool = False
) -> Path:
    """The path for `num_tokens` rows of this dtype (for experts: their average) and a weight of this layout."""
    if device.type != "cuda" or dtype is not torch.bfloat16 or layout not in KINDS:
        return "Torch"
    return _select(layout, device, num_tokens >= DEQUANTIZE_FROM, grouped, os.environ.get(VARIABLE, ""))


@functools.cache
def _select(layout: str, device: torch.device, many: bool, grouped: bool, asked: str) -> Path:
    wanted = parse_override(asked)
    reason = why_not(layout, torch.cuda.get_device_capability(device), triton_lacks())
    path: Path = wanted or ("Dequantize" if many else "Fused")
    level = logging.INFO if reason is None else logging.WARNING
    if reason is not None:
        path = "Torch"
    else:
        reason = f"{VARIABLE}={asked}" if wanted else f"{'at least' if many else 'below'} {DEQUANTIZE_FROM} tokens"
    kind = "experts" if grouped else "linears"
    _log.log(level, "%s %s on %s: %s (%s)", layout, kind, device, path, reason)
    return path


def parse_override(value: str) -> Path | None:
    """The path requested by `ORBIT_KERNELS`; None for `Auto` or an empty value."""
    if value in ("", "Auto"):
        return None
    if value not in get_args(Path):
        raise UsageError(
            f"{value!r} is not a kernel path", where=VARIABLE, fix=f"Auto, {', '.join(get_args(Path))}, or unset"
        )
    return value  # type: ignore[return-value]


def why_not(layout: str, capability: tuple[int, int], lacks: str | None) -> str | None:
    """Why no kernel can run for this layout on such a device; None if one can.

    Args:
        lacks: as `triton_lacks` says.
    """
    if torch.version.hip is not None:
        return "the kernels are for CUDA"
    if lacks is not None:
        return lacks
    needed = MINIMUM_CAPABILITY.get(KINDS[layout], E4M3_CAPABILITY)
    if capability < needed:
        return f"compute capability {capability[0]}.{capability[1]} is below {needed[0]}.{needed[1]}"
    return None


@functools.cache
def triton_lacks() -> str | None:
    """What Triton needs on a GPU and this machine lacks: it compiles C code at its first launch."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: install orbit-rl[train]"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler: install gcc"
    if not os.path.exists(os.path.join(sysconfig.get_path("include", "posix_prefix"), "Python.h")):
        return "Triton finds no Python.h: install Python's headers (python3-dev)"
    return None
