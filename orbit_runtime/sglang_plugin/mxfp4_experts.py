"""LoRA on DeepSeek-V4's FP4 experts: SGLang's Marlin kernels, with its LoRA between their two products.

SGLang has several kernels for these experts. All except Marlin's compute both products in one kernel, with no place to
add a LoRA; Marlin's are two, and SGLang has a pass with LoRA between them for other formats. This format differs in
three things: the class that says how weights are packed, V4's clamped activation, and the routers' scaling factor,
which is already part of its routing weights.

Hopper (SM90) and SM120 only, as SGLang's kernels. GPU: not run on hardware.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from orbit_runtime.sglang_plugin.experts import LORA, LORA_LAYOUTS

PACKED_AS = "Mxfp4MarlinMoEMethod"
TILE = 16
"""Number of rows per tile of Marlin's weights."""
AfterProduct = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def hooks(layout: str) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """(target, hook, kind) of each hook. Args: layout: layout of the adapters that this server serves."""
    if layout in LORA_LAYOUTS:
        yield f"{LORA}.layers.get_lora_layer", _around_layer, "AROUND"


def cut(after_gate_up: AfterProduct | None, limit: float | None) -> AfterProduct | None:
    """The step between gate and up and their activation: adds the LoRA, then applies V4's clamp, in place.

    Args:
        limit: upper bound of gate, and bound of the absolute value of up; None for no clamp.
    """
    if limit is None:
        return after_gate_up

    def after(tokens_TK: Tensor, products_TkN: Tensor, weights_Tk: Tensor, experts_Tk: Tensor) -> None:
        if after_gate_up is not None:
            after_gate_up(tokens_TK, products_TkN, weights_Tk, experts_Tk)
        gate, up = products_TkN.chunk(2, -1)
        gate.clamp_(max=limit)
        up.clamp_(min=-limit, max=limit)

    return after


def check_unpadded(name: str, held: int, asked: int) -> None:
    """Raises ValueError if B's rows would not align with those of gate and up."""
    if held != asked:
        raise ValueError(
            f"Marlin pads the {name} of these experts from {asked} to {held}; a LoRA of theirs has {asked}"
        )


def _around_layer(original: Callable[..., Any], layer: Any, backend: Any, **named: Any) -> Any:
    if type(getattr(layer, "quant_method", None)).__name__ != PACKED_AS:
        return original(layer, backend, **named)
    wrapper, shown = _classes()
    packed = layer.quant_method
    # SGLang's wrapper accepts Marlin's weights only from the classes of two other formats.
    layer.quant_method = shown(packed)
    try:
        made = wrapper(layer, backend, **named)
    finally:
        layer.quant_method = packed
    made.quant_method = packed
    check_unpadded("width", made._quant_info.w2_qweight.shape[1] * TILE, layer.intermediate_size_per_partition)
    check_unpadded("tokens", made._quant_info.w13_qweight.shape[1] * TILE, layer.hidden_size)
    return made


@functools.cache
def _classes() -> tuple[type, type]:
    """Imports SGLang, which is available only in its own processes."""
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod
    from sglang.srt.layers.quantization.mxfp4_marlin_moe import build_marlin_moe_quant_info
    from sglang.srt.lora.layers import FusedMoEWithLoRA
    from sglang.srt.lora.lora_moe_runners import build_lora_hooks

    class Shown(ModelOptNvFp4FusedMoEMethod):  # type: ignore[misc]
        def __init__(self, packed: Any) -> None:
            self.packed = packed

        def __getattr__(self, name: str) -> Any:
            return getattr(self.packed, name)

        def get_marlin_quant_info(self, layer: Any) -> Any:
            return build_marlin_moe_quant_info(layer)

    class PackedExpertsWithLoRA(FusedMoEWithLoRA):  # type: ignore[misc]
        def _forward_with_lora(self, hidden_states: Tensor, topk_output: Any, lora_info: Any, **_: Any) -> Tensor:
            layer, core = self.base_layer, self._lora_runner.runner_core
            sent = layer.dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)
            between = build_lora_hooks(sent.hidden_states, lora_info, sent.topk_output.topk_ids)
            between = replace(between, after_gate_up=cut(between.after_gate_up, core.config.swiglu_limit))
            # For this format the routing weights already include it (`fuse_routed_scaling_factor_in_topk`).
            config = replace(core.config, routed_scaling_factor=None)
            computed = core.run_from_dispatch(sent, build_marlin_moe_quant_info(layer), config, hooks=between)
            combined: Tensor = layer.dispatcher.combine(combine_input=computed)
            return combined

    return PackedExpertsWithLoRA, Shown
