"""Hooks into SGLang: `/server_info` tells what stands in its LoRA slots and what the last batches applied.

Belongs here: where SGLang is hooked. Does not belong here: what is read there (`readback`).
"""

from __future__ import annotations

from typing import Any

from orbit_runtime.sglang_plugin import readback

KEY = "orbit"
"""Name of our part of an internal state."""
_registered = False


def register() -> None:
    global _registered
    if _registered:
        return
    _registered = True
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
        _add_adapters,
        HookType.AFTER,
    )
    HookRegistry.register("sglang.srt.lora.lora_manager.LoRAManager.prepare_lora_batch", _note_batch, HookType.AFTER)


def _add_adapters(result: Any, controller: Any, *_: Any, **__: Any) -> Any:
    """A failure is told, not raised: it would take the server down, and the proof fails without the facts."""
    try:
        manager = controller.scheduler.tp_worker.model_runner.lora_manager
        facts = {"version": readback.VERSION, "adapters": readback.describe_adapters(manager) if manager else {}}
    except Exception as error:
        facts = {"version": readback.VERSION, "error": f"{type(error).__name__}: {error}"}
    result.internal_state[KEY] = facts
    return result


def _note_batch(result: Any, manager: Any, forward_batch: Any, *_: Any, **__: Any) -> Any:
    readback.note_batch(manager, forward_batch)
    return result
