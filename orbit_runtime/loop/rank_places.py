"""Placement of ranks: which GPUs, how many threads.

Belongs here: distributing a node's resources. Does not belong here: how the model is sharded (`planner`), starting
ranks (`workers`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def rank_devices(gpus: Sequence[int] | None, nodes: int) -> tuple[str, ...] | None:
    """Each rank's GPU by its name on this machine; with several nodes by its index over all nodes, because each node's
    Ray assigns its own."""
    if gpus is None:
        return None
    return visible_gpus(gpus, os.environ) if nodes == 1 else tuple(map(str, gpus))


def visible_gpus(gpus: Sequence[int], environment: Mapping[str, str]) -> tuple[str, ...]:
    """The value of `CUDA_VISIBLE_DEVICES` for each of these indices into the GPUs that this process sees."""
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    names = shown.split(",") if shown else [str(gpu) for gpu in range(max(gpus) + 1)]
    return tuple(names[gpu].strip() for gpu in gpus)


def threads_of_a_rank(ranks: int, device: str) -> int:
    """Threads of one of `ranks` ranks on a node: on a CPU they share the cores; on a GPU each keeps torch's number."""
    import torch

    return max(1, torch.get_num_threads() // (ranks if device == "cpu" else 1))
