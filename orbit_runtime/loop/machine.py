"""What this machine has: the facts that `Auto` is resolved from.

Belongs here: asking torch, if it is there. Does not belong here: deciding (`spec.resolve`).
"""

from __future__ import annotations

from importlib.util import find_spec

from orbit_runtime.spec import MachineFacts


def machine_facts() -> MachineFacts:
    """GPUs of this machine; none where torch is not installed."""
    if find_spec("torch") is None:
        return MachineFacts(has_cuda=False, num_gpus=0)
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return MachineFacts(has_cuda=count > 0, num_gpus=count)
