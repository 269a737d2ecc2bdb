"""Hooks into SGLang: `/server_info` tells what stands in its LoRA slots and what the last batches applied.

Belongs here: where SGLang is hooked for every adapter. Does not belong here: what is read there (`readback`), how
adapters come (`arrival`), the hooks of OFT (`oft_hooks`) and of routed experts (`experts`).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from orbit_runtime.sglang_plugin import arrival, cpu, experts, oft_hooks, readback, taps

KEY = "orbit"
"""Name of our part of an internal state."""
LORA = "sglang.srt.lora"
_targets: list[str] = []


def register(oft_block_size: int, expert_layout: str) -> None:
    """
    Args:
        oft_block_size: 0: this server serves no OFT.
        expert_layout: of the adapters of routed experts; empty: they are left to SGLang.
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
        ("sglang.srt.model_executor.model_runner.ModelRunner.forward", _around_pass, "AROUND"),
        *(oft_hooks.hooks(oft_block_size) if oft_block_size else ()),
        *(experts.hooks(expert_layout) if expert_layout else ()),
        *cpu.hooks(),
    ]
    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, HookType[kind])
        _targets.append(target)


def _add_adapters(result: Any, controller: Any, *_: Any, **__: Any) -> Any:
    result.internal_state[KEY] = _take(controller.scheduler.tp_worker.model_runner)()
    return result


def _take(runner: Any, applied: Collection[str] | None = None) -> Callable[[], dict[str, Any]]:
    """Copies what the facts are made of; what it gives back makes them, when and where its caller likes.

    A failure is told, not raised: it would take the server down, and the proof fails without the facts.
    """
    facts: dict[str, Any] = {"version": readback.VERSION}
    try:
        manager = runner.lora_manager
        taken = readback.take_adapters(manager, applied) if manager else []
    except Exception as error:
        facts["error"] = _told(error)

    def make() -> dict[str, Any]:
        if "error" not in facts:
            try:
                # SGLang logs a hook that it cannot place, and goes on without.
                facts["unhooked"] = [
                    name for name in _targets if not hasattr(pkgutil.resolve_name(name), "__wrapped__")
                ]
                facts["adapters"] = readback.describe(taken)
            except Exception as error:
                facts["error"] = _told(error)
        return facts

    return make


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _around_pass(original: Any, runner: Any, forward_batch: Any, *rest: Any, **named: Any) -> Any:
    result = taps.around_forward(original, runner, forward_batch, *rest, **named)
    taps.tell(runner, forward_batch, partial(_take, runner))
    return result


def _note_batch(result: Any, manager: Any, forward_batch: Any, *_: Any, **__: Any) -> Any:
    readback.note_batch(manager, [adapter for adapter in forward_batch.lora_ids if adapter is not None])
    oft_hooks.note_batch(manager, forward_batch)
    return result
