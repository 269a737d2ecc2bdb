"""Chooses the first layout, micro-batch and recomputation that fit, in order of preference.

Belongs here: trying settings. Does not belong here: the order of layouts (`layout`), bytes (`parts`), messages (`plan`,
`advice`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

from orbit_runtime.model_info.weights import ModelFacts
from orbit_runtime.planner.activations import Recompute
from orbit_runtime.planner.adapter_size import AdapterSize
from orbit_runtime.planner.job import Job, Machine
from orbit_runtime.planner.layout import Layout, asked_layout, possible_layouts
from orbit_runtime.planner.parts import PHASES, Copies, Phase, Setting, Sizes, size_parts

SMALLEST_MICRO_BATCH = 1024


@dataclass(frozen=True)
class Choice:
    """A setting with its sizes; the KV cache is cut to the remaining memory if the engine can work with less."""

    setting: Setting
    sizes: Sizes
    capacity: int | None

    @property
    def binding(self) -> Phase:
        """The phase that needs most, with the KV cache at the least that the engine can work with."""

        def least(phase: Phase) -> int:
            cache = self.sizes.phases[phase].get("KV cache", 0)
            if self.setting.job.in_process or not cache:
                return self.needed(phase)
            return self.needed(phase) - cache + self.sizes.kv_bytes_per_sequence

        return max(PHASES, key=least)

    @property
    def fits(self) -> bool:
        return self.capacity is None or all(self.needed(phase) <= self.capacity for phase in PHASES)

    def needed(self, phase: Phase) -> int:
        return self.sizes.total(phase)


def capacity_of(machine: Machine) -> int | None:
    """Bytes of one device; None if unknown."""
    return machine.gpu.usable_bytes if machine.gpu else machine.host_bytes


def choose(model: ModelFacts, job: Job, machine: Machine, adapter: AdapterSize, server_gpus: int = 1) -> Choice:
    """The preferred setting that fits; if none does, the one that exceeds the memory least."""
    tried: list[Choice] = []
    for setting in _settings(model, job, machine, adapter, server_gpus):
        choice = try_setting(setting)
        if choice.fits:
            return choice
        tried.append(choice)
    return min(tried, key=lambda each: each.needed(each.binding))


def try_setting(setting: Setting) -> Choice:
    """Sizes of one setting. SGLang's KV cache takes the remaining memory; the torch engine takes what it needs.

    The memory must be free in every phase in which the cache exists: a server that does not sleep keeps it in all.
    """
    capacity, sizes = capacity_of(setting.machine), size_parts(setting)
    holding = [phase for phase in PHASES if "KV cache" in sizes.phases[phase]]
    if capacity is not None and not setting.job.in_process and holding:
        asked = sizes.phases[holding[0]]["KV cache"]
        left = min(capacity - (sizes.total(phase) - asked) for phase in holding)
        held = max(1, min(sizes.running, left // sizes.kv_bytes_per_sequence))
        cache = {"KV cache": held * sizes.kv_bytes_per_sequence}
        sizes = replace(
            sizes, phases={**sizes.phases, **{phase: {**sizes.phases[phase], **cache} for phase in holding}}
        )
    return Choice(setting, sizes, capacity)


def _settings(
    model: ModelFacts, job: Job, machine: Machine, adapter: AdapterSize, server_gpus: int
) -> Iterator[Setting]:
    layouts, copies = _layouts(model, job, machine), _copies(job)
    for recompute, micro, layout in product(_recomputes(job), _micro_batches(job), layouts):
        yield Setting(model, job, machine, adapter, layout, copies, micro, recompute, server_gpus)


def _layouts(model: ModelFacts, job: Job, machine: Machine) -> list[Layout]:
    if job.trainer == "Torch":
        return [Layout()]
    found = [] if machine.gpu is None else list(possible_layouts(model, len(job.devices.trainer), job))
    # Exchanges within every layer stay on one node.
    found = [layout for layout in found if machine.nodes == 1 or machine.node_gpus % layout.tensor == 0]
    # On a CPU, as many ranks as the sizes need. If nothing is possible, the plan says why for the requested sizes.
    return found or [asked_layout(job.asked)]


def _copies(job: Job) -> Copies:
    """Copies of the base. No other process reads a trainer's base."""
    return "Shared" if job.in_process or job.is_elsewhere else "Two"


def _recomputes(job: Job) -> tuple[Recompute, ...]:
    """From the least to the most work."""
    return get_args(Recompute) if job.recompute == "Auto" else (job.recompute,)


def _micro_batches(job: Job) -> Iterator[int]:
    """The manifest's size, then successive halves down to what one full sequence needs."""
    size = job.micro_batch_tokens
    yield size
    while not job.is_micro_batch_fixed and size // 2 >= max(SMALLEST_MICRO_BATCH, job.max_sequence):
        size //= 2
        yield size
