"""The machine that a manifest requests.

Belongs here: reading `spec.placement`. Does not belong here: what this machine has (`cli`), arithmetic (`parts`).
"""

from __future__ import annotations

from orbit_runtime.errors import UsageError
from orbit_runtime.model_info.gpus import CARDS, find_gpu
from orbit_runtime.planner.job import Machine
from orbit_runtime.spec import OrbitRun
from orbit_runtime.spec.quantities import read_quantity


def asked_machine(run: OrbitRun, gpu: str | None = None) -> Machine | None:
    """`placement.gpus` on each node, of the type that `gpu` or `placement.gpuProduct` names; the CPU if no GPU is
    requested.

    None if the manifest requests GPUs without naming the type.

    Raises:
        UsageError: the GPU is unknown.
    """
    placement = run.spec.placement
    memory, disk = placement.resources.memory, placement.model_cache.size_limit
    host = read_quantity(memory) if memory else None
    if gpu is None and placement.gpus == 0:
        return Machine(None, 0, host, read_quantity(disk) if disk else None)
    name = gpu or placement.gpu_product
    if name is None:
        return None
    card = find_gpu(name)
    if card is None:
        raise UsageError(
            f"`{name}` is not a GPU that the planner knows",
            where="--gpu" if gpu else "spec.placement.gpuProduct",
            fix=f"name one of {', '.join(each.name for each in CARDS)}",
        )
    gpus, nodes = max(1, placement.gpus), placement.nodes
    return Machine(card, gpus * nodes, host, read_quantity(disk) if disk else None, nodes)
