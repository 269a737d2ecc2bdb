"""Hooks into SGLang: `/server_info` reports the contents of its LoRA slots and what the last batches applied.

Belongs here: the hooks that every adapter needs, and those without which SGLang 0.5.23 would sample or compute
otherwise than the trainer whatever the adapter. Does not belong here: what is read of the slots (`readback`), how
adapters arrive (`adapter_loading`), the hooks of OFT (`oft_hooks`) and of routed experts (`experts`), refused settings
(`planner.support.manifests`), formats that SGLang has a flag or a variable for (`planner.support.kernels`).

*The adapter that sampled.* A completion's tokens are sent with it. SGLang's responses name none: a client that relied
on its own request alone would record the wrong policy version if the server applied another slot, or none.

*Log-probs under top-k, top-p and min-p.* SGLang reports log-probs of the softmax before truncation, and measures
top-p's mass without regard to top-k; on a GPU it differs again with min-p (`layers/sampler.py`). It takes the logarithm
of `probs` after drawing. The hook therefore sets removed tokens to 0 before that, by the trainer's own definition
(`algorithms.distribution`), and SGLang draws from the rest as from a whole distribution.

*Keys and values stay in the model's dtype.* Most of NVIDIA's exports, and some in compressed-tensors, come with scales
for a cache in FP8. SGLang then stores keys and values in FP8 by itself (`mem_cache/kv_cache_dtype.py`, "auto"), while
the trainer computes them in BF16 and the plan counts two bytes each. `--kv-cache-dtype bf16` would not undo it:
attention back ends apply a checkpoint's scales to every cache that is not "auto". So the quantisation is told that
there is no proposal. DeepSeek-V4's cache, whose dtype its attention prescribes, is not affected.

*Activations are not rounded.* SGLang uses `CompressedTensorsW8A16Fp8` (Marlin) only on GPUs without FP8, or for
checkpoints that describe no activations. Experts have no such class.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from orbit_runtime.algorithms.distribution import truncate
from orbit_runtime.sglang_plugin import (
    adapter_loading,
    cpu,
    deepseek_v4,
    experts,
    mxfp4_experts,
    oft_hooks,
    ranks,
    readback,
    taps,
)
from orbit_runtime.workers.servers.protocol import APPLIED_KEY, FACTS_VERSION, STATE_KEY, PluginSettings

LORA = "sglang.srt.lora"
STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
BASE = ""
_targets: list[str] = []
_applied: dict[str, str] = {}
"""Adapter name by SGLang's id, from its newest batch. Has one entry for every adapter ever published."""


def register(settings: PluginSettings) -> None:
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
        (f"{LORA}.lora.LoRAAdapter.initialize_weights", adapter_loading.load_lora, "AROUND"),
        (f"{LORA}.lora_manager.LoRAManager.load_lora_adapter", ranks.agree_on_load, "AFTER"),
        (f"{LORA}.lora_manager.LoRAManager.load_lora_adapter_from_tensors", ranks.agree_on_load, "AFTER"),
        ("sglang.srt.model_executor.model_runner.ModelRunner.forward", _around_pass, "AROUND"),
        (f"{STREAMER}.build_additional_customized_info", _add_applied, "AROUND"),
        *_numerics(weight_only=settings.weight_only),
        *deepseek_v4.hooks(),
        *(oft_hooks.hooks(settings.oft_block_size, settings.experts) if settings.oft_block_size else ()),
        *(experts.hooks(settings.experts) if settings.experts else ()),
        *mxfp4_experts.hooks(settings.experts),
        *cpu.hooks(),
    ]
    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, HookType[kind])
        _targets.append(target)


def _add_adapters(result: Any, controller: Any, *_: Any, **__: Any) -> Any:
    result.internal_state[STATE_KEY] = _facts(controller.scheduler.tp_worker.model_runner)
    return result


def _facts(runner: Any) -> dict[str, Any]:
    """Facts of all ranks. Every rank calls it; only rank 0's result is used."""
    adapters, failure = _take(runner, None, (), copied=False)
    every = ranks.gather(_own(adapters, failure, is_alone=ranks.count() == 1))
    return {} if every is None else _describe(adapters, [every[0], *map(_received, every[1:])])


def _received(own: dict[str, Any]) -> dict[str, Any]:
    """Another rank's report, with the values in memory that it shares."""
    try:
        return own | {"reports": readback.receive_reports(own["reports"])}
    except Exception as error:
        return own | {"reports": {}, "error": own["error"] or _told(error)}


@dataclass(frozen=True)
class CopiedAdapters:
    """Copies from which this rank computes facts about some adapters, whenever and wherever the holder likes."""

    adapters: list[readback.HeldAdapter]
    failure: str | None
    is_ready: Callable[[], None]
    """Waits until the copies are complete."""

    def own(self) -> dict[str, Any]:
        self.is_ready()
        return _own(self.adapters, self.failure, is_alone=ranks.count() == 1)

    received = staticmethod(_received)

    def facts(self, every: list[Any]) -> dict[str, Any]:
        return _describe(self.adapters, every)


def _take_copies(runner: Any, names: Collection[str], standing: Collection[str]) -> CopiedAdapters:
    adapters, failure = _take(runner, names, standing, copied=True)
    return CopiedAdapters(adapters, failure, _copies_made())


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
    facts: dict[str, Any] = {"version": FACTS_VERSION, "adapters": {}}
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
    note_applied(manager, adapters)
    oft_hooks.note_batch(manager, forward_batch)
    return result


def note_applied(manager: Any, adapters: Iterable[str]) -> None:
    """Call after SGLang chose the slots of a batch: an id counts as applied if its slot holds it."""
    if not _applied:
        from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

        SchedulerOutputStreamer.has_additional_customized_info = True
        _applied[BASE] = ""
    pool = manager.memory_pool
    for each in set(adapters):
        slot = pool.uid_to_buffer_id.get(each)
        is_held = slot is not None and pool.buffer_id_to_uid[slot] == each and each in manager.lora_refs
        _applied[each] = manager.lora_refs[each].lora_name if is_held else ""


def _add_applied(original: Any, streamer: Any, reqs: Sequence[Any]) -> dict[str, list[Any]]:
    told: dict[str, list[Any]] = original(streamer, reqs)
    return {**told, APPLIED_KEY: [[_applied.get(req.lora_id or BASE, "")] for req in reqs]}


QUANTISATION = "sglang.srt.layers.quantization"
COMPRESSED = f"{QUANTISATION}.compressed_tensors.compressed_tensors.CompressedTensorsConfig"
PROPOSALS = {
    f"{QUANTISATION}.modelopt_quant.ModelOptQuantConfig": "kv_cache_quant_algo",
    f"{QUANTISATION}.fp8.Fp8Config": "kv_cache_quant_algo",
    COMPRESSED: "kv_cache_scheme",
}
"""Class → the attribute that proposes a dtype for keys and values."""


def _numerics(*, weight_only: bool) -> Iterator[tuple[str, Any, str]]:
    """(target, hook, kind) of the hooks that keep SGLang from sampling or computing otherwise than the trainer."""
    yield "sglang.srt.layers.sampler.Sampler._sample_from_probs", _draw_from_what_is_left, "AROUND"
    for name in PROPOSALS:
        yield f"{name}.__init__", _forget, "AFTER"
    if weight_only:
        yield f"{COMPRESSED}._get_scheme_from_parts", _without_activations, "AROUND"


def _draw_from_what_is_left(
    original: Any, sampler: Any, probs: torch.Tensor, info: Any, positions: torch.Tensor, is_simple: bool
) -> Any:
    if is_simple:
        return original(sampler, probs, info, positions, True)
    whole = probs.clone() if info.need_top_k_sampling else None
    cut_off(probs, info)
    drawn = original(sampler, probs, info, positions, True)
    if whole is not None:
        # SGLang's temperature 0 is top-k 1 at temperature 1. It reports the model's own log-probs if a whole batch is
        # greedy; in a mixed batch they must be the same.
        is_greedy = (info.top_ks == 1)[:, None] & (info.temperatures.reshape(-1, 1) == 1.0)
        probs.copy_(torch.where(is_greedy, whole, probs))
    return drawn


def cut_off(probs_BV: torch.Tensor, info: Any) -> None:
    """Works in place. `info`: SGLang's `SamplingBatchInfo`, whose `top_ks` use 1 << 30 for the whole vocabulary."""
    top_k = info.top_ks.to(torch.int64)
    top_k_B1 = torch.where(top_k >= probs_BV.shape[-1], 0, top_k)[:, None] if info.need_top_k_sampling else None
    left = truncate(
        torch.log(probs_BV.float()),
        top_k_B1,
        info.top_ps[:, None].float() if info.need_top_p_sampling else None,
        info.min_ps[:, None].float() if info.need_min_p_sampling else None,
    )
    probs_BV.copy_(torch.softmax(left, dim=-1))


def _forget(_result: None, quantisation: Any, /, *_: Any, **__: Any) -> None:
    for name in set(PROPOSALS.values()):
        if name in vars(quantisation):
            setattr(quantisation, name, None)


def _without_activations(original: Any, config: Any, weights: Any, activations: Any, *rest: Any, **named: Any) -> Any:
    """Weights by row or for the whole tensor; the class has no scales by block."""
    if not (config._is_fp8_w8a8(weights, activations) and config._is_fp8_w8a16(weights, activations)):
        return original(config, weights, activations, *rest, **named)
    from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A16Fp8

    # A static scale of activations is in the file: the class takes it, and does not use it.
    return CompressedTensorsW8A16Fp8(strategy=weights.strategy, is_static_input_scheme=not activations.dynamic)
