"""Hooks into SGLang: `/server_info` reports the contents of its LoRA slots and what the last batches applied.

Belongs here: the hooks that every adapter needs. Does not belong here: what is read there (`readback`), how adapters
arrive (`arrival`), the hooks of OFT (`oft_hooks`) and of routed experts (`experts`).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from orbit_runtime.sglang_plugin import (
    applied,
    arrival,
    cpu,
    deepseek_v4,
    experts,
    kv_cache,
    mxfp4_experts,
    oft_hooks,
    ranks,
    readback,
    sampling,
    taps,
    weight_only,
)

KEY = "orbit"
"""Key of our part of an internal state."""
LORA = "sglang.srt.lora"
_targets: list[str] = []


def register(oft_block_size: int, expert_layout: str) -> None:
    """
    Args:
        oft_block_size: 0 if this server does not serve OFT.
        expert_layout: layout of routed experts' adapters; empty to leave them to SGLang.
    """
    if _targets:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = [
        (
            "sglang.srt.managers.scheduler_components.internal_state."
            "SchedulerInternalStateController.get_internal_state",
            _add_adapters,
            "AFTER",
        ),
        (f"{LORA}.lora_manager.LoRAManager.prepare_lora_batch", _note_batch, "AFTER"),
        (f"{LORA}.lora.LoRAAdapter.initialize_weights", arrival.load_lora, "AROUND"),
        (f"{LORA}.lora_manager.LoRAManager.load_lora_adapter", ranks.agree_on_load, "AFTER"),
        (f"{LORA}.lora_manager.LoRAManager.load_lora_adapter_from_tensors", ranks.agree_on_load, "AFTER"),
        ("sglang.srt.model_executor.model_runner.ModelRunner.forward", _around_pass, "AROUND"),
        *applied.hooks(),
        *sampling.hooks(),
        *kv_cache.hooks(),
        *weight_only.hooks(),
        *deepseek_v4.hooks(),
        *(oft_hooks.hooks(oft_block_size) if oft_block_size else ()),
        *(experts.hooks(expert_layout) if expert_layout else ()),
        *mxfp4_experts.hooks(expert_layout),
        *cpu.hooks(),
    ]
    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, HookType[kind])
        _targets.append(target)


def _add_adapters(result: Any, controller: Any, *_: Any, **__: Any) -> Any:
    result.internal_state[KEY] = _facts(controller.scheduler.tp_worker.model_runner)
    return result


def _facts(runner: Any) -> dict[str, Any]:
    """Facts of all ranks. Every rank calls it; only rank 0's result is used."""
    adapters, failure = _take(runner, None, (), copied=False)
    every = ranks.gather(_own(adapters, failure, is_alone=ranks.count() == 1))
    return {} if every is None else _describe(adapters, [every[0], *map(_received, every[1:])])


def _received(own: dict[str, Any]) -> dict[str, Any]:
    """Another rank's report with the values that it lent."""
    try:
        return own | {"reports": readback.receive_reports(own["reports"])}
    except Exception as error:
        return own | {"reports": {}, "error": own["error"] or _told(error)}


@dataclass(frozen=True)
class Copied:
    """Copies from which this rank computes facts about some adapters, whenever and wherever the holder likes."""

    adapters: list[readback.HeldAdapter]
    failure: str | None
    is_ready: Callable[[], None]
    """Waits until the copies are complete."""

    def own(self) -> dict[str, Any]:
        self.is_ready()
        return _own(self.adapters, self.failure, is_alone=ranks.count() == 1)

    def received(self, own: dict[str, Any]) -> dict[str, Any]:
        return _received(own)

    def facts(self, every: list[Any]) -> dict[str, Any]:
        return _describe(self.adapters, every)


def _take_copies(runner: Any, names: Collection[str], standing: Collection[str]) -> Copied:
    adapters, failure = _take(runner, names, standing, copied=True)
    return Copied(adapters, failure, _copies_made())


def _copies_made() -> Callable[[], None]:
    """A GPU copies asynchronously, in the order of this thread's stream: other threads have to wait for it."""
    if not torch.cuda.is_available():
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def _take(
    runner: Any, names: Collection[str] | None, standing: Collection[str], *, copied: bool
) -> tuple[list[readback.HeldAdapter], str | None]:
    """The adapters that this rank holds, or why they cannot be read.

    A failure is returned, not raised: an exception would take the server down, and the proof fails without the facts.
    """
    manager = runner.lora_manager
    try:
        return (readback.take_adapters(manager, names, standing, copied=copied) if manager else []), None
    except Exception as error:
        return [], _told(error)


def _own(adapters: list[readback.HeldAdapter], failure: str | None, *, is_alone: bool) -> dict[str, Any]:
    own: dict[str, Any] = {"unhooked": [], "reports": {}, "error": failure}
    try:
        # SGLang logs a hook that it cannot install, and continues without it.
        own["unhooked"] = [name for name in _targets if not hasattr(pkgutil.resolve_name(name), "__wrapped__")]
        own["reports"] = readback.report_adapters(adapters, is_alone=is_alone)
    except Exception as error:
        own["error"] = own["error"] or _told(error)
    return own


def _describe(adapters: list[readback.HeldAdapter], every: list[Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {"version": readback.VERSION, "adapters": {}}
    facts["unhooked"] = sorted({name for each in every for name in each["unhooked"]})
    errors = [f"rank {rank}: {each['error']}" for rank, each in enumerate(every) if each["error"]]
    try:
        if not errors:
            facts["adapters"] = readback.describe(adapters, [each["reports"] for each in every])
    except Exception as error:
        errors.append(_told(error))
    return facts | {"error": "; ".join(errors)} if errors else facts


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _around_pass(original: Any, runner: Any, forward_batch: Any, *rest: Any, **named: Any) -> Any:
    result = taps.around_forward(original, runner, forward_batch, *rest, **named)
    taps.tell(runner, forward_batch, _take_copies)
    return result


def _note_batch(result: Any, manager: Any, forward_batch: Any, *_: Any, **__: Any) -> Any:
    adapters = [adapter for adapter in forward_batch.lora_ids if adapter is not None]
    readback.note_batch(manager, adapters)
    applied.note_batch(manager, adapters)
    oft_hooks.note_batch(manager, forward_batch)
    return result
