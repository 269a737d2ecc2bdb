"""The resources of this machine, found without torch: GPUs as the driver names them, and main memory."""

from __future__ import annotations

import os

from orbit_runtime.model_info.gpus import GPUCard, find_gpu
from orbit_runtime.planner import Machine
from orbit_runtime.spec.placement import Placement
from orbit_runtime.workers.servers.process import AGENT_VARIABLE
from orbit_runtime.workers.system import ask_driver, joined_nodes, usable_memory

CUDA_SHARE = 0.97
"""Fraction of the memory reported by the driver that programs can use."""


def this_machine(placement: Placement) -> Machine:
    """This machine's GPUs; without any, the CPU and its memory.

    In a `Split` pod, the GPUs of the whole pod: this container sees only the trainer's GPUs and half of the memory.
    """
    gpus, memory = _gpus(), usable_memory()
    if not os.environ.get(AGENT_VARIABLE):
        nodes = joined_nodes(placement.nodes)
        return Machine(gpus[0], len(gpus) * nodes, memory, nodes=nodes) if gpus else Machine(None, 0, memory)
    both = None if memory is None else 2 * memory
    return Machine(gpus[0], placement.gpus, both) if gpus else Machine(None, 0, both)


def _gpus() -> list[GPUCard]:
    rows = [line.rpartition(",") for line in ask_driver("name,memory.total")]
    try:
        return [find_gpu(name) or _unknown(name.strip(), int(mib)) for name, _, mib in rows]
    except ValueError:
        return []


def _unknown(name: str, mib: int) -> GPUCard:
    return GPUCard(name, int(mib * 2**20 * CUDA_SHARE), 0.0, (), "nvidia-smi")
