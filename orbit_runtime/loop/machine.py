"""What this machine has: the facts that `Auto` is resolved from.

Belongs here: asking torch, if it is there. Does not belong here: deciding (`spec.resolve`).
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from orbit_runtime.model_info.gpus import GPUCard, find_gpu
from orbit_runtime.planner import Machine
from orbit_runtime.spec import MachineFacts
from orbit_runtime.spec.placement import Placement
from orbit_runtime.workers.sglang_launch import AGENT_VARIABLE


def machine_facts() -> MachineFacts:
    """GPUs of this machine; none where torch is not installed."""
    if find_spec("torch") is None:
        return MachineFacts(has_cuda=False, num_gpus=0)
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return MachineFacts(has_cuda=count > 0, num_gpus=count)


def gpu_machine(placement: Placement) -> Machine:
    """The GPUs that the run has, as torch counts them; in a `Split` pod those of both containers. Not run on hardware.

    Only where there are GPUs.
    """
    import torch

    name = torch.cuda.get_device_name(0)
    card = find_gpu(name)
    if card is None:
        card = GPUCard(name, int(torch.cuda.get_device_properties(0).total_memory), 0.0, (), "torch")
    return Machine(card, placement.gpus if os.environ.get(AGENT_VARIABLE) else machine_facts().num_gpus)
