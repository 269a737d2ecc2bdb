"""The machine, its division between trainer and engine, and the decisions on which memory depends.

Belongs here: reading these fields, with `Auto` for trainer and engine resolved for the machine; dividing the GPUs of
`placement`, one answer for the plan, the run and the operator's pod.
Does not belong here: arithmetic (`parts`), or whether anything is supported (`support`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from orbit_runtime.errors import UsageError
from orbit_runtime.model_info.gpus import CARDS, GPUCard, find_gpu
from orbit_runtime.spec import OrbitRun
from orbit_runtime.spec.placement import Placement, read_quantity
from orbit_runtime.spec.run import RunSpec


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


ExpertLayout = Literal["SharedOuter", "Shared", "PerExpert", "None"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Example: eight B200 with 2 TiB of main memory: `Machine(card, 8, 2 * 2**40)`; two such: `Machine(card, 16, 2 *
    2**40, nodes=2)`."""

    gpu: GPUCard | None
    """The GPU; None if everything runs on the CPU, in main memory."""
    num_gpus: int = 0
    """GPUs of all nodes together."""
    host_bytes: int | None = None
    """Main memory of each node; disk is also per node."""
    disk_bytes: int | None = None
    nodes: int = 1
    """Number of nodes, all alike. With more than one, the first belongs to the engine."""

    @property
    def name(self) -> str:
        if self.gpu is None:
            return "the CPU"
        each = f"{self.node_gpus} x {self.gpu.name}"
        return f"{self.nodes} nodes of {each}" if self.nodes > 1 else each

    @property
    def node_gpus(self) -> int:
        return self.num_gpus // self.nodes


@dataclass(frozen=True, slots=True)
class Job:
    """A run's specification with what the planner decides for a machine."""

    spec: RunSpec
    trainer: str
    engine: str
    rank: int
    """LoRA's rank or OFT's block size."""
    experts: ExpertLayout
    attention: Literal["Eager", "SDPA", "Chunked"]
    running: int
    """Most completions sampled at the same time."""
    is_micro_batch_fixed: bool
    """Whether the manifest sets the micro-batch; otherwise the planner may lower it."""
    is_running_fixed: bool
    """Likewise `running`, for an engine in the trainer's process."""
    replicas: int
    """Engine servers in one device's memory; on the CPU, main memory holds all of them."""
    devices: Devices
    sleep: Literal["None", "Cache", "All"]
    """What servers on the trainer's GPUs release while the trainer works."""

    @property
    def samples(self) -> bool:
        """Whether an engine samples in this run."""
        return self.spec.algorithm.type != "SFT"

    @property
    def is_split(self) -> bool:
        """Whether trainer and engine have separate GPUs."""
        return self.devices.are_apart

    @property
    def engine_arguments(self) -> Mapping[str, Any]:
        """`rollout.engineArguments`, each of the type that SGLang accepts."""
        return self.spec.rollout.engine_arguments

    @property
    def speculates_with_mtp(self) -> bool:
        """Whether the engine loads the checkpoint's MTP layer, which drafts the next tokens."""
        return self.engine_arguments.get("speculative-algorithm") in ("NEXTN", "EAGLE")

    @property
    def in_process(self) -> bool:
        """Whether trainer and engine are one process and so share one base."""
        return self.engine == "Torch"

    @property
    def is_elsewhere(self) -> bool:
        """Whether the engine runs on machines outside the plan."""
        return self.engine == "OpenAI"


def build_job(run: OrbitRun, machine: Machine, *, may_choose: bool = True, devices: Devices | None = None) -> Job:
    """Resolves `Auto`: torch for both on the CPU or one GPU, Megatron and SGLang on several; SGLang beside Megatron.

    Args:
        devices: the devices, if they differ from what `placement` makes of the machine.
        may_choose: whether a micro-batch and running requests may be lowered where the manifest does not set them.
    """
    spec = run.spec
    training, adapter, rollout = spec.training, spec.adapter, spec.rollout
    several = machine.num_gpus > 1
    devices = devices or split_devices(spec.placement, machine.num_gpus, machine.nodes)
    prompts = training.prompts_per_step + rollout.over_sampling
    may_divide = len(devices.trainer) > 1 and adapter.type != "Full"
    return Job(
        spec,
        trainer=_decide(training.trainer, "Megatron" if may_divide else "Torch"),
        engine=_decide(rollout.engine, "SGLang" if several or training.trainer == "Megatron" else "Torch"),
        rank=adapter.lora.rank if adapter.lora else adapter.oft.block_size if adapter.oft else 0,
        experts=adapter.expert_layout,
        attention=training.decided_attention(spec.model.max_sequence_length),
        running=min(rollout.max_running_requests, prompts * spec.algorithm.group_size),
        is_micro_batch_fixed=not may_choose or "micro_batch_tokens" in training.model_fields_set,
        is_running_fixed=not may_choose or "max_running_requests" in rollout.model_fields_set,
        replicas=rollout.replicas if machine.gpu is None else 1,
        devices=devices,
        sleep=rollout.sleep,
    )


def _decide(asked: str, chosen: str) -> str:
    return chosen if asked == "Auto" else asked


def requested_machine(run: OrbitRun, gpu: str | None = None) -> Machine | None:
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
