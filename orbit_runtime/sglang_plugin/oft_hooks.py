"""Hooks that make SGLang serve OFT beside LoRA: an OFT folder becomes a LoRA adapter of rank 0, with R beside it.

Names, ids, slots, batches, draining and the radix cache's keys therefore remain SGLang's own, and none of it is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from orbit_runtime.sglang_plugin.adapter_loading import files_of
from orbit_runtime.sglang_plugin.experts import fused_layers
from orbit_runtime.sglang_plugin.rotation import UNTURNED, RotationTable
from orbit_runtime.sglang_plugin.weights import language_model, name_in_files

LORA = "sglang.srt.lora"
LAYERS = ("ColumnParallelLinearWithLoRA", "RowParallelLinearWithLoRA", "ReplicatedLinearWithLoRA")
"""SGLang's wrappers of linear layers that have a `forward` of their own."""
MARK = "orbit_type"
"""Field in the settings of an adapter that is presented to SGLang as a LoRA."""


def hooks(block_size: int, experts: str) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """(target, hook, kind) of each hook."""
    yield f"{LORA}.lora_manager.LoRAManager.init_memory_pool", _adder(block_size, experts), "AFTER"
    yield f"{LORA}.lora_config.LoRAConfig.get_lora_config", _pose_as_lora, "AFTER"
    yield f"{LORA}.lora.LoRAAdapter.initialize_weights", _load, "AROUND"
    yield f"{LORA}.mem_pool.LoRAMemoryPool.load_lora_weight_to_buffer", _fill, "AROUND"
    yield f"{LORA}.mem_pool.LoRAMemoryPool._clear_buffer_slot_for_base", _clear, "AFTER"
    for layer in LAYERS:
        yield f"{LORA}.layers.{layer}.forward", _turn_input, "BEFORE"


def note_batch(manager: Any, forward_batch: Any) -> None:
    """Called after SGLang chose the slots of a batch."""
    rotations = getattr(manager, "rotations", None)
    if rotations is None:
        return
    from sglang.srt.lora.utils import generate_sequence_lengths

    resident = manager.memory_pool.uid_to_buffer_id
    slots = [resident.get(uid, UNTURNED) for uid in forward_batch.lora_ids]
    rotations.prepare(slots, generate_sequence_lengths(forward_batch, device="cpu").tolist())


def _adder(block_size: int, experts: str) -> Callable[..., None]:
    def add_rotations(_: Any, manager: Any) -> None:
        """Allocates buffers for every target, once, before SGLang sizes its cache and captures graphs."""
        from sglang.srt.distributed.utils import get_group_rank_size

        rotations = RotationTable(block_size, manager.max_loras_per_batch, manager.device, manager.dtype)
        for modules in manager.lora_modules:
            for name, module in modules.items():
                if type(module).forward.__qualname__.partition(".")[0] not in LAYERS:
                    raise ValueError(f"the plug-in rotates no input of {name}, a {type(module).__name__}")
                base = module.base_layer
                local = getattr(base, "input_size_per_partition", base.input_size)
                place = get_group_rank_size(base.tp_group)[0] if local != base.input_size else 0
                module.rotation = rotations.add_layer(
                    name_in_files(name), base.input_size, local_features=local, rank=place
                )
        if experts == "Shared":
            _add_experts(rotations, manager)
        # The other hooks find them here: each is called with one of these objects.
        manager.rotations = manager.memory_pool.rotations = rotations
        object.__setattr__(manager.base_model, "rotations", rotations)

    return add_rotations


def _add_experts(rotations: RotationTable, manager: Any) -> None:
    config = manager.base_hf_config
    for name, layer in fused_layers(language_model(manager.base_model)):
        if "gate_up_proj" in manager.target_modules:
            kept = ("gate_up_proj",) if config.model_type == "gpt_oss" else ("w1", "w3")
            layer.rotation = rotations.add_layer(
                f"{name}.gate_up_proj", config.hidden_size, names=tuple(f"{name}.{part}" for part in kept)
            )
        if "down_proj" in manager.target_modules:
            if manager.device.type != "cpu":
                raise ValueError(f"{name} is one kernel: the input of down_proj cannot be rotated inside it")
            local = layer.intermediate_size_per_partition
            layer.down_rotation = rotations.add_layer(
                f"{name}.down_proj", local * layer.moe_tp_size, local_features=local, rank=layer.moe_tp_rank,
                names=(f"{name}.w2",),
            )  # fmt: skip


def _pose_as_lora(settings: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
    if settings.get("peft_type") != "OFT":
        return settings
    # SGLang divides alpha by the rank and requires a rank that its buffers support; `_load` sets it to 0.
    return settings | {"peft_type": "LORA", "r": 1, "lora_alpha": 1, MARK: "OFT"}


def _load(original: Callable[..., None], adapter: Any) -> None:
    """SGLang returns errors raised here as its response to the load call."""
    if adapter.config.hf_config.get(MARK) != "OFT":
        original(adapter)
        return
    rotations: RotationTable = adapter.base_model.rotations
    adapter.published = rotations.load(files_of(Path(adapter.config.path)))
    adapter.config.r = 0


def _fill(original: Callable[..., None], pool: Any, uid: str | None, slot: int, adapter: Any, *rest: Any) -> None:
    published = getattr(adapter, "published", None)
    if published is None:
        _clear(None, pool, slot)
        original(pool, uid, slot, adapter, *rest)
        return
    pool._clear_buffer_slot_for_base(slot)
    pool.rotations.fill(slot, published)


def _clear(result: Any, pool: Any, slot: int) -> Any:
    rotations = getattr(pool, "rotations", None)
    if rotations is not None:
        rotations.clear(slot)
    return result


def _turn_input(module: Any, x: Any, *rest: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    rotation = getattr(module, "rotation", None)
    if rotation is None:
        return None
    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

    return (module, rotation.turn(x, captured=get_is_capture_mode()), *rest), named
