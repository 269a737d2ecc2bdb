"""Chooses the first layout, micro-batch and recomputation that fit, in order of preference; and if a run does not fit,
the first change that makes it fit.

Belongs here: trying settings and changes. Does not belong here: the order of layouts (`layout`), bytes (`parts`),
messages (`plan`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

from orbit_runtime.model_info.gpus import CARDS
from orbit_runtime.model_info.weights import ModelFacts
from orbit_runtime.planner.activations import Recompute
from orbit_runtime.planner.adapter_size import AdapterSize, adapter_size
from orbit_runtime.planner.assumptions import WIDENED_SHARE
from orbit_runtime.planner.job import Job, Machine
from orbit_runtime.planner.layout import Layout, possible_layouts, requested_layout
from orbit_runtime.planner.parts import PHASES, WIDENED, Copies, PartSizes, Phase, Setting, size_parts

SMALLEST_MICRO_BATCH = 1024


@dataclass(frozen=True)
class Candidate:
    """A setting with its sizes; the KV cache is cut to the remaining memory if the engine can work with less."""

    setting: Setting
    sizes: PartSizes
    capacity: int | None

    @property
    def binding(self) -> Phase:
        """The phase that needs most, with the KV cache at the least that the engine can work with."""

        def least(phase: Phase) -> int:
            cache = self.sizes.phases[phase].get("KV cache", 0)
            if not _may_cut(self.setting.job) or not cache:
                return self.needed(phase)
            return self.needed(phase) - cache + self.sizes.kv_bytes_per_sequence

        return max(PHASES, key=least)

    @property
    def fits(self) -> bool:
        if self.capacity is None:
            return True
        # What is held to save time is a small part of the memory.
        widened = self.sizes.phases["load"].get(WIDENED, 0)
        return WIDENED_SHARE * widened <= self.capacity and all(self.needed(each) <= self.capacity for each in PHASES)

    def needed(self, phase: Phase) -> int:
        return self.sizes.total(phase)


def capacity_of(machine: Machine) -> int | None:
    """Bytes of one device; None if unknown."""
    return machine.gpu.usable_bytes if machine.gpu else machine.host_bytes


def choose(model: ModelFacts, job: Job, machine: Machine, adapter: AdapterSize, server_gpus: int = 1) -> Candidate:
    """The preferred setting that fits; if none does, the one that exceeds the memory least."""
    tried: list[Candidate] = []
    for setting in _settings(model, job, machine, adapter, server_gpus):
        choice = try_setting(setting)
        if choice.fits:
            return choice
        tried.append(choice)
    return min(tried, key=lambda each: each.needed(each.binding))


def try_setting(setting: Setting) -> Candidate:
    """Sizes of one setting. SGLang's KV cache takes the remaining memory; the torch engine's takes what it needs, or
    what remains if fewer completions may be sampled at a time.

    The memory must be free in every phase in which the cache exists: a server that does not sleep keeps it in all.
    """
    capacity, sizes = capacity_of(setting.machine), size_parts(setting)
    holding = [phase for phase in PHASES if "KV cache" in sizes.phases[phase]]
    if capacity is not None and _may_cut(setting.job) and holding:
        asked = sizes.phases[holding[0]]["KV cache"]
        left = min(capacity - (sizes.total(phase) - asked) for phase in holding)
        held = max(1, min(sizes.running, left // sizes.kv_bytes_per_sequence))
        cache = {"KV cache": held * sizes.kv_bytes_per_sequence}
        sizes = replace(
            sizes, phases={**sizes.phases, **{phase: {**sizes.phases[phase], **cache} for phase in holding}}
        )
    return Candidate(setting, sizes, capacity)


def _may_cut(job: Job) -> bool:
    return not (job.in_process and job.is_running_fixed)


def _settings(
    model: ModelFacts, job: Job, machine: Machine, adapter: AdapterSize, server_gpus: int
) -> Iterator[Setting]:
    layouts, copies = _layouts(model, job, machine), _copies(job)
    widened = _widened(job, machine)
    for recompute, micro, layout, wide in product(_recomputes(job), _micro_batches(job), layouts, widened):
        yield Setting(model, job, machine, adapter, layout, copies, micro, recompute, server_gpus, wide)


def _layouts(model: ModelFacts, job: Job, machine: Machine) -> list[Layout]:
    if job.trainer == "Torch":
        return [Layout()]
    found = [] if machine.gpu is None else list(possible_layouts(model, len(job.devices.trainer), job))
    # Exchanges within every layer stay on one node.
    found = [layout for layout in found if machine.nodes == 1 or machine.node_gpus % layout.tensor == 0]
    # On a CPU, as many ranks as the sizes need. If nothing is possible, the plan says why for the requested sizes.
    return found or [requested_layout(job.spec.training.parallel)]


def _copies(job: Job) -> Copies:
    """Copies of the base. No other process reads a trainer's base."""
    return "Shared" if job.in_process or job.is_elsewhere else "Two"


def _widened(job: Job, machine: Machine) -> tuple[bool, ...]:
    """Whether linears may be held dense: by a torch trainer, in memory that is known."""
    passes = job.trainer == "Torch" and job.spec.adapter.type != "Full"
    return (True, False) if passes and machine.gpu is None and machine.host_bytes is not None else (False,)


def _recomputes(job: Job) -> tuple[Recompute, ...]:
    """Possible modes of recomputation, from the least to the most work."""
    return get_args(Recompute) if job.spec.training.recompute == "Auto" else (job.spec.training.recompute,)


def _micro_batches(job: Job) -> Iterator[int]:
    """The manifest's size, then successive halves down to what one full sequence needs."""
    size = job.spec.training.micro_batch_tokens
    yield size
    while not job.is_micro_batch_fixed and size // 2 >= max(SMALLEST_MICRO_BATCH, job.spec.model.max_sequence_length):
        size //= 2
        yield size


BY_SIZE = sorted(CARDS, key=lambda card: card.usable_bytes)


def advise(choice: Candidate, machine: Machine) -> tuple[str, bool]:
    """The first change to the manifest that makes the run fit, or else advice beyond the manifest; and which it is."""
    for words, changed in _changes(choice.setting):
        if try_setting(changed).fits:
            return words, True
    return _elsewhere(choice, machine), False


def _elsewhere(choice: Candidate, machine: Machine) -> str:
    smallest = replace(choice.setting, job=replace(choice.setting.job, is_micro_batch_fixed=False))
    smaller = _with_experts(smallest, "None")
    if machine.gpu is None:
        return "run it on a machine with more memory, or choose a smaller model"
    fitting = [card.name for card in BY_SIZE if _fits_on(choice.setting, replace(machine, gpu=card))]
    if fitting:
        return (
            f"no change of the manifest is enough on {machine.gpu.name}; it fits on {machine.num_gpus} x {fitting[0]}"
        )
    if fitting_later := [card.name for card in BY_SIZE if _fits_on(smaller, replace(machine, gpu=card))]:
        return f"with a small adapter it fits on {machine.num_gpus} x {fitting_later[0]}"
    return "use more GPUs (placement.gpus), or a smaller model"


def _changes(setting: Setting) -> Iterator[tuple[str, Setting]]:
    """Yields changes, from the smallest sacrifice to the largest."""
    job = setting.job
    micro = setting.micro_batch_tokens
    while micro // 2 >= max(256, job.spec.model.max_sequence_length):
        micro //= 2
        yield f"write training.microBatchTokens: {micro}", replace(setting, micro_batch_tokens=micro)
    if setting.recompute != "PerLayer":
        yield "write training.recompute: PerLayer", replace(setting, recompute="PerLayer")
    if job.in_process:
        for running in (job.running // 2, job.running // 4, job.running // 8, 1):
            if running:
                changed = replace(setting, job=replace(job, running=running))
                yield f"write rollout.maxRunningRequests: {running}", changed
                yield (
                    f"write rollout.maxRunningRequests: {running} and training.microBatchTokens: {micro}",
                    replace(changed, micro_batch_tokens=micro),
                )
    elif not job.is_split and job.engine == "SGLang" and setting.machine.gpu is not None and job.sleep == "None":
        for sleep in ("Cache", "All"):
            yield f"write rollout.sleep: {sleep}", replace(setting, job=replace(job, sleep=sleep))
    if setting.adapter.experts and job.experts not in ("Shared", "None"):
        fewer = "Shared" if job.spec.adapter.type == "OFT" else "None"
        yield f"write adapter.experts: {fewer}", _with_experts(setting, fewer)


def _with_experts(setting: Setting, experts: str) -> Setting:
    job = replace(setting.job, experts=experts)  # type: ignore[arg-type]
    return replace(setting, job=job, adapter=adapter_size(setting.model.architecture, job))


def _fits_on(setting: Setting, machine: Machine) -> bool:
    return choose(setting.model, setting.job, machine, setting.adapter, setting.server_gpus).fits
