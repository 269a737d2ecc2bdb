"""Where ranks compute: on which GPUs, with how many threads.

Belongs here: dealing out what a node has. Does not belong here: how the model is divided (`planner`), starting ranks
(`workers`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def rank_devices(gpus: Sequence[int] | None, nodes: int) -> tuple[str, ...] | None:
    """The GPU of each rank by its name on this machine; with several nodes as it is counted over all, because each
    node's Ray deals out its own."""
    if gpus is None:
        return None
    return visible_gpus(gpus, os.environ) if nodes == 1 else tuple(map(str, gpus))


def visible_gpus(gpus: Sequence[int], environment: Mapping[str, str]) -> tuple[str, ...]:
    """What `CUDA_VISIBLE_DEVICES` is to be for each of these, which are counted among those that this process sees."""
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    names = shown.split(",") if shown else [str(gpu) for gpu in range(max(gpus) + 1)]
    return tuple(names[gpu].strip() for gpu in gpus)


def threads_of_a_rank(ranks: int, device: str) -> int:
    """Of one among so many on a node: on a CPU they share its cores; beside a GPU a rank needs few."""
    import torch

    return max(1, torch.get_num_threads() // (ranks if device == "cpu" else 1))
