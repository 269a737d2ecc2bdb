"""Facts about this machine: those that `Auto` is resolved from, and those that a run's last bits depend on."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

from orbit_runtime.errors import StoppedOnRequest
from orbit_runtime.model_info.gpus import GPUCard, find_gpu
from orbit_runtime.observability.versions import installed_versions
from orbit_runtime.planner import Machine
from orbit_runtime.quant.kernels.compiled import compiler_version, find_compiler, of_processor, processor_flags
from orbit_runtime.spec import MachineFacts
from orbit_runtime.spec.placement import Placement
from orbit_runtime.spec.resolve import has_bf16_products
from orbit_runtime.workers.child.signals import StopFlag
from orbit_runtime.workers.servers.process import AGENT_VARIABLE
from orbit_runtime.workers.system import gc_paused, joined_nodes, ray_address, usable_memory


def machine_facts() -> MachineFacts:
    """GPUs of this machine (none if torch is not installed), and whether other nodes can be joined."""
    joins_nodes = ray_address() is not None
    if find_spec("torch") is None:
        return MachineFacts(has_cuda=False, num_gpus=0, joins_nodes=joins_nodes)
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # Without Orbit's kernels the gradient of attention takes several times as long in BF16 as in fp32.
    bf16 = has_bf16_products(processor_flags()) and find_compiler() is not None
    return MachineFacts(has_cuda=count > 0, num_gpus=count, multiplies_bf16=bf16, joins_nodes=joins_nodes)


def find_machine(stage: Callable[[str], None], stop: StopFlag) -> MachineFacts:
    """Imports torch, which takes seconds, and asks it.

    Args:
        stage: called with the name of the stage that begins.

    Raises:
        StoppedOnRequest: a stop was requested meanwhile.
    """
    if find_spec("torch") is not None:
        stage("importing torch")
        with gc_paused():
            from orbit_runtime.policy import load  # noqa: F401
    if stop:
        raise StoppedOnRequest(f"{stop.reason} before the model was loaded; the same command starts again")
    return machine_facts()


def gpu_machine(placement: Placement) -> Machine:
    """The run's GPUs, counted by torch; in a `Split` pod the GPUs of both containers, and with several nodes the same
    number on each. Not run on hardware.

    Call it only on a machine with GPUs.
    """
    import torch

    name = torch.cuda.get_device_name(0)
    card = find_gpu(name)
    if card is None:
        card = GPUCard(name, int(torch.cuda.get_device_properties(0).total_memory), 0.0, (), "torch")
    if os.environ.get(AGENT_VARIABLE):
        return Machine(card, placement.gpus)
    nodes = joined_nodes(placement.nodes)
    return Machine(card, machine_facts().num_gpus * nodes, nodes=nodes)


def planned_machine(placement: Placement, device: str) -> Machine:
    """The machine to plan for: its GPUs, or on a CPU its memory; in a `Split` pod the memory of both containers."""
    if device == "cuda":
        return gpu_machine(placement)
    memory = usable_memory()
    both = os.environ.get(AGENT_VARIABLE) and memory is not None
    return Machine(None, 0, 2 * memory if both and memory else memory)


def rounding_facts() -> dict[str, str]:
    """Facts that decide the order of sums, hence a run's last bits: on a CPU, equal facts give equal bits.

    Needs torch.
    """
    import torch

    from orbit_runtime.policy import native

    facts = {
        "threads": str(torch.get_num_threads()),
        "processor": of_processor("model name") or platform.processor() or platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "kernels": compiler_version().partition("\n")[0] if native.kernel() is not None else "torch's",
        **{name: version for name, version in installed_versions().items() if name in ("torch", "transformers")},
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def add_rounding_facts(before: Sequence[Mapping[str, str]], now: Mapping[str, str]) -> list[Mapping[str, str]]:
    """The `rounding` list of `run.json`: one entry for each change of these facts, newest last."""
    return [*before] if before and before[-1] == now else [*before, now]


def explain_rounding(before: Sequence[Mapping[str, str]], now: Mapping[str, str]) -> list[str]:
    """One line for each fact that differs between an earlier start of the run and this process; none if all agree."""
    if not before:
        return ["threads and processor of the run were not recorded"]
    lines = [
        f"{name}: {then[name]} then, {now.get(name, 'none')} now"
        for then in before
        for name in then
        if then[name] != now.get(name)
    ]
    return list(dict.fromkeys(lines))
