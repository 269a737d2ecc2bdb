"""What to change if a run does not fit: changes that were tried, not guesses.

Belongs here: the changes worth trying. Does not belong here: the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from orbit_runtime.model_info.gpus import CARDS
from orbit_runtime.planner.adapter_size import adapter_size
from orbit_runtime.planner.job import Machine
from orbit_runtime.planner.parts import Setting
from orbit_runtime.planner.search import Choice, choose, try_setting

BY_SIZE = sorted(CARDS, key=lambda card: card.usable_bytes)


def advise(choice: Choice, machine: Machine) -> tuple[str, bool]:
    """The first change to the manifest that makes the run fit, or else advice beyond the manifest; and which it is."""
    for words, changed in _changes(choice.setting):
        if try_setting(changed).fits:
            return words, True
    return _elsewhere(choice, machine), False


def _elsewhere(choice: Choice, machine: Machine) -> str:
    smaller = _smallest(choice.setting)
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
    while micro // 2 >= max(256, job.max_sequence):
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
        fewer = "Shared" if job.adapter == "OFT" else "None"
        yield f"write adapter.experts: {fewer}", _with_experts(setting, fewer)


def _with_experts(setting: Setting, experts: str) -> Setting:
    job = replace(setting.job, experts=experts)  # type: ignore[arg-type]
    return replace(setting, job=job, adapter=adapter_size(setting.model.architecture, job))


def _smallest(setting: Setting) -> Setting:
    return _with_experts(replace(setting, job=replace(setting.job, is_micro_batch_fixed=False)), "None")


def _fits_on(setting: Setting, machine: Machine) -> bool:
    return choose(setting.model, setting.job, machine, setting.adapter, setting.server_gpus).fits
