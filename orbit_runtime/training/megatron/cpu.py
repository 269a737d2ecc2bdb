"""Megatron-Core on a machine without CUDA.

Its collectives allocate on `torch.cuda.current_device()`. Where there is no CUDA that is the CPU, for this process and
from then on; nothing else of torch is touched.

Belongs here: what Megatron-Core asks of CUDA in the code that Orbit calls.
"""

from __future__ import annotations

import torch


def allow_cpu() -> None:
    """Before the first collective of Megatron-Core. Safe to call twice; does nothing where there is a CUDA device."""
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
