"""Adapters on the routed experts of SGLang's fused layers: which layers SGLang wraps, and the experts' pass on a CPU.

LoRA is kept in SGLang's own buffers, and on a GPU applied by SGLang's own kernels. Those do not run on a CPU: there the
pass is SGLang's plain one, `moe_forward_native`, with the experts' weights replaced by objects whose product is
adapted. OFT has one R for all experts of a layer: R of gate and up rotates tokens before dispatch, on any device and
over any base; R of down belongs inside the fused kernel, and is available on a CPU only.

Belongs here: hooks around `FusedMoE`. Does not belong here: dense layers (`oft_hooks`), reading slots (`readback`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from orbit_runtime.adapters.oft import rotate
from orbit_runtime.sglang_plugin.rotation import LayerRotation

FUSED = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE"
LORA = "sglang.srt.lora"
LORA_LAYOUTS = ("SharedOuter", "PerExpert")
"""Layouts that SGLang's buffers support; for others, its LoRA is configured not to apply to experts."""


def hooks(layout: str) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """(target, hook, kind) of each hook.

    Args:
        layout: layout of the adapters that this server serves, as in `AdapterConfig.expert_layout`.
    """
    if layout in LORA_LAYOUTS:
        yield f"{LORA}.lora_manager.LoRAManager.init_lora_modules", _show_wrappers, "AFTER"
        yield f"{LORA}.layers.FusedMoEWithLoRA.forward", _around_wrapper, "AROUND"
    else:
        yield f"{LORA}.lora_manager.LoRAManager.init_lora_modules", _leave_experts, "BEFORE"
        yield f"{LORA}.mem_pool.LoRAMemoryPool._has_moe_module", lambda *_: False, "AROUND"
    if layout == "Shared":
        yield f"{FUSED}._dispatch_with_pre_quant", _turn_tokens, "BEFORE"
    if layout != "None":
        yield f"{FUSED}.run_moe_core", _run_on_cpu, "AROUND"


def fused_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, module) of a model's layers of routed experts, by SGLang's names: `model.layers.0.mlp.experts`."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    for name, module in model.named_modules():
        if isinstance(module, FusedMoE):
            yield name.removesuffix(".base_layer"), module


def _leave_experts(manager: Any) -> None:
    """Keeps SGLang from wrapping experts, as it does whenever `gate_proj`, `up_proj` and `down_proj` are targets, even
    those of a dense layer.
    """
    model, names = manager.base_model, {name for name, _ in fused_layers(manager.base_model)}
    own = getattr(model, "should_apply_lora", None)
    model.should_apply_lora = lambda name: name not in names and (own is None or own(name))


def _show_wrappers(_: Any, manager: Any) -> None:
    for modules in manager.lora_modules:
        for module in modules.values():
            if hasattr(module, "slice_moe_lora_a_weights"):
                object.__setattr__(module.base_layer, "lora_wrapper", module)


def _around_wrapper(original: Callable[..., Tensor], wrapper: Any, x: Tensor, *rest: Any, **named: Any) -> Tensor:
    """SGLang's own layer, with `_run_on_cpu` inside it on a CPU."""
    if x.device.type != "cpu":
        return original(wrapper, x, *rest, **named)
    return wrapper.base_layer.forward(x, *rest, **named)  # type: ignore[no-any-return]


def _turn_tokens(
    layer: Any, tokens_TK: Tensor, routes: Any, quantised: Any = None
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Runs on every path into the kernels; the router ran before, on tokens without rotation."""
    rotation: LayerRotation | None = getattr(layer, "rotation", None)
    if rotation is None:
        return None
    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

    # gpt-oss pads tokens to a width that its kernels prefer.
    width = rotation.in_features
    turned_TK = rotation.turn(tokens_TK[..., :width], captured=get_is_capture_mode())
    if tokens_TK.shape[-1] > width:
        turned_TK = torch.cat([turned_TK, tokens_TK[..., width:]], -1)
    # DeepSeek's blocks quantise once for routed and shared experts (`quantised`): those bytes are of unrotated tokens.
    # If they come from another stream, CUDA's graphs are captured only where this one waits for it.
    ready = getattr(quantised, "ready", None)
    if ready is not None:
        ready.wait()
    return (layer, turned_TK, routes, None), {}


def _run_on_cpu(original: Callable[..., Any], layer: Any, dispatch_output: Any) -> Any:
    tokens_TK = dispatch_output.hidden_states
    adapter = _adapter(layer)
    if adapter is None or tokens_TK.device.type != "cpu":
        return original(layer, dispatch_output)
    slots_T = adapter.slots(len(tokens_TK))
    if not bool((slots_T >= 0).any()):
        return original(layer, dispatch_output)
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    weights_TX, experts_TX, logits_TE = dispatch_output.topk_output
    output_TK = torch.empty_like(tokens_TK)
    for slot in slots_T.unique().tolist():
        rows = (slots_T == slot).nonzero().squeeze(1)
        routed = StandardTopKOutput(weights_TX[rows], experts_TX[rows], logits_TE)
        adapted = layer if slot < 0 else AdaptedExperts(layer, adapter.products(slot))
        output_TK[rows] = moe_forward_native(adapted, tokens_TK[rows], routed, layer.moe_runner_config)
    return StandardCombineInput(hidden_states=output_TK)


def _adapter(layer: Any) -> LoRAOnExperts | OFTOnExperts | None:
    wrapper, rotation = getattr(layer, "lora_wrapper", None), getattr(layer, "down_rotation", None)
    if wrapper is not None:
        return LoRAOnExperts(wrapper)
    return OFTOnExperts(rotation) if rotation is not None else None


@dataclass(frozen=True)
class AdaptedWeight:
    """Replaces the weight in `F.linear`: computes that product with an expert's adapter."""

    weight: Tensor
    turn: Tensor | None = None
    """R for the input."""
    updates: tuple[tuple[Tensor, Tensor], ...] = ()
    """(A, B) for each part of the weight's rows, with the scaling included in B."""

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, arguments: Any = (), named: Any = None) -> Tensor:
        assert function is F.linear, f"SGLang's plain pass does not {function} with an expert's weight"
        x, self = arguments
        if self.turn is not None:
            x = rotate(x, self.turn)
        y: Tensor = F.linear(x, self.weight)
        if self.updates:
            y = y + torch.cat([F.linear(F.linear(x, A), B) for A, B in self.updates], -1)
        return y


Product = Callable[[int, Tensor], AdaptedWeight]
"""(an expert's index, its weight) → the weight with its adapter."""


class AdaptedExperts:
    """A layer of SGLang, in the form that its plain pass reads, with weights adapted by one slot."""

    def __init__(self, layer: Any, products: tuple[Product, Product]) -> None:
        gate_up, down = products
        self._layer = layer
        self.w13_weight = _Each(layer.w13_weight, gate_up)
        self.w2_weight = _Each(layer.w2_weight, down)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


@dataclass(frozen=True)
class _Each:
    weights: Tensor
    product: Product

    def __getitem__(self, expert: int) -> AdaptedWeight:
        return self.product(expert, self.weights[expert])


@dataclass(frozen=True)
class LoRAOnExperts:
    """SGLang's buffers of one layer, `[slots, experts or 1, ...]`; B includes the scaling."""

    wrapper: Any

    def slots(self, rows: int) -> Tensor:
        """Slot of each token; -1 if it has no adapter."""
        from sglang.srt.runtime_context import LoRABatchLayout

        batch = self.wrapper.lora_backend.get_batch_info(LoRABatchLayout.TP_GLOBAL)
        if batch is None:
            return torch.full((rows,), -1)
        slots_T: Tensor = batch.moe_lora_info.token_lora_mapping
        assert len(slots_T) == rows, f"{rows} tokens in a pass that was prepared for {len(slots_T)}"
        return slots_T

    def products(self, slot: int) -> tuple[Product, Product]:
        up_A, up_B, down_A, down_B = (buffer[slot] for buffer in expert_buffers(self.wrapper))

        def gate_up(expert: int, weight: Tensor) -> AdaptedWeight:
            halves = zip(_of(up_A, expert).chunk(2), _of(up_B, expert).chunk(2), strict=True)
            return AdaptedWeight(weight, updates=tuple(halves))

        def down(expert: int, weight: Tensor) -> AdaptedWeight:
            return AdaptedWeight(weight, updates=((_of(down_A, expert), _of(down_B, expert)),))

        return gate_up, down


@dataclass(frozen=True)
class OFTOnExperts:
    """R of down; R of gate and up has already been applied to the tokens."""

    rotation: LayerRotation

    def slots(self, rows: int) -> Tensor:
        return self.rotation.rows.slots_T[:rows]

    def products(self, slot: int) -> tuple[Product, Product]:
        def down(_: int, weight: Tensor) -> AdaptedWeight:
            return AdaptedWeight(weight, turn=self.rotation.part(slot, weight.shape[-1]))

        return lambda _, weight: AdaptedWeight(weight), down


def expert_buffers(wrapper: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A and B of gate and up, which are stacked, then A and B of down."""
    return (
        wrapper.gate_up_lora_a_weights,
        wrapper.gate_up_lora_b_weights,
        wrapper.down_lora_a_weights,
        wrapper.down_lora_b_weights,
    )


def _of(values_E: Tensor, expert: int) -> Tensor:
    return values_E[expert if len(values_E) > 1 else 0]
