"""Assigns GPUs to the trainer and the engine: one answer for the plan, the run and the operator's pod.

Belongs here: dividing the GPUs of `placement`. Does not belong here: how many GPUs a server takes (`serving`).
"""

from __future__ import annotations

from dataclasses import dataclass

from orbit_runtime.spec.placement import Placement


@dataclass(frozen=True, slots=True)
class Devices:
    """Example: a trainer on GPU 0 and engines on the other seven: `Devices(range(1), range(1, 8))`.

    GPUs are numbered over the whole machine, or over all nodes; in a `Split` pod each container numbers its own from 0.
    """

    trainer: range
    engine: range

    @property
    def are_apart(self) -> bool:
        """Whether no GPU belongs to both the trainer and the engine."""
        return len(self.engine) > 0 and not set(self.trainer) & set(self.engine)

    def servers(self, count: int, size: int) -> tuple[range, ...]:
        """The GPUs of each of `count` servers: `size` consecutive ones."""
        first = self.engine.start
        return tuple(range(first + index * size, first + (index + 1) * size) for index in range(count))


def split_devices(placement: Placement, num_gpus: int, nodes: int = 1) -> Devices:
    """`Colocated`: both have all GPUs. `Split`: the trainer has the first `trainerGpus`, or half; the engine the rest.

    Over several nodes, `num_gpus` in all, the engine has the first, where the run is, and the trainer the others.

    A machine with at most one GPU is not split. The engine keeps at least one GPU: `device_problem` tells whether the
    machine has enough for `trainerGpus`.
    """
    if nodes > 1:
        return Devices(range(num_gpus // nodes, num_gpus), range(num_gpus // nodes))
    if placement.layout != "Split" or num_gpus < 2:
        return Devices(range(num_gpus), range(num_gpus))
    first = min(placement.trainer_gpus or num_gpus // 2, num_gpus - 1)
    return Devices(range(first), range(first, num_gpus))


def device_problem(placement: Placement, num_gpus: int) -> str | None:
    """Why `trainerGpus` is impossible on a machine with this many GPUs; None if it is possible."""
    asked = placement.trainer_gpus
    if placement.layout != "Split" or asked is None or num_gpus < 2 or asked < num_gpus:
        return None
    return f"the trainer's {asked} GPUs leave the engine none of this machine's {num_gpus}"


def gpu_names(gpus: range) -> str:
    """Example: `gpu_names(range(1, 8)) == "GPUs 1-7"`."""
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {gpus[0]}-{gpus[-1]}"
