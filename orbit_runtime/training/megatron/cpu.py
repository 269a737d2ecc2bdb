"""Megatron-Core on a machine without CUDA.

Its collectives allocate on `torch.cuda.current_device()`. Without CUDA that call is made to return the CPU, in this
process and from then on; nothing else in torch is touched.

Belongs here: what Megatron-Core requires of CUDA in the code paths that Orbit uses.
"""

from __future__ import annotations

import torch


def allow_cpu() -> None:
    """Call before Megatron-Core's first collective. Safe to call twice; does nothing if there is a CUDA device."""
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
