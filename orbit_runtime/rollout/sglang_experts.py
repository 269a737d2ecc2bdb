"""Adapters of routed experts in SGLang servers that Orbit starts: what 0.5.23 and the plug-in can apply, and its flags.

    LoRA, SharedOuter or PerExpert   SGLang's own buffers and, on a GPU, its own kernels, over the bases in
                                     `MOE_RUNNERS`; DeepSeek-V4's FP4 through a wrapper in the plug-in; on a CPU the
                                     plug-in computes the experts from the same buffers
    OFT, Shared                      the plug-in rotates tokens before the experts, over any base; R of down on a CPU

Belongs here: what is refused, and why. Does not belong here: limits visible in the manifest alone (`planner.support`).
GPU: not run on hardware.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.errors import UnsupportedError

LORA_LAYOUTS = ("SharedOuter", "PerExpert")
OFT_LAYOUTS = ("Shared",)
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
MOE_RUNNERS = {
    "BF16": "triton", "FP8Block": "triton", "FP8BlockV4": "triton", "INT4": "marlin", "INT4Asymmetric": "marlin",
    "NVFP4ModelOpt": "marlin", "MXFP4V4": "marlin",
}  # fmt: skip
"""Layout of the experts → SGLang's runner with LoRA. These are the layouts whose class describes to LoRA how the base
is packed, by `get_triton_quant_info` or `get_marlin_quant_info`; for the last one `sglang_plugin.mxfp4_experts` does. A
test reads this from SGLang's source."""
MARLIN_FP4 = (9, 12)
"""Major compute capabilities on which SGLang multiplies MXFP4V4 with Marlin."""


def served_experts(adapter: AdapterConfig, layers: Collection[str]) -> str:
    """The layout of this adapter's part on routed experts; `None` if it has no such part."""
    return adapter.expert_layout if _of_experts(layers) else "None"


def check_experts(adapter: AdapterConfig, layers: Collection[str], device: str, formats: Collection[str]) -> None:
    """Raises UnsupportedError (78) for an adapter of routed experts that a server cannot apply as the trainer does.

    Args:
        layers: names of the adapted modules.
        formats: layouts of the adapted experts, as `quant` names them.
    """
    targets = {name.rpartition(".")[2] for name in _of_experts(layers)}
    if not targets:
        return
    layouts = LORA_LAYOUTS if adapter.type == "LoRA" else OFT_LAYOUTS
    if adapter.expert_layout not in layouts:
        raise UnsupportedError(
            f"SGLang holds no {adapter.type} of routed experts in the layout {adapter.expert_layout}",
            where="spec.adapter.experts", fix=f"write {' or '.join(layouts)}, or use engine: Torch",
        )  # fmt: skip
    if adapter.type == "LoRA":
        _check_lora(adapter, targets)
    dense = {name.rpartition(".")[2] for name in layers} - targets
    if left_out := ", ".join(name for name in PROJECTIONS if name in dense):
        raise UnsupportedError(
            f"SGLang matches targets by their last name alone: with {left_out} in other layers, experts need it too",
            where="spec.adapter.targets", fix=f"write {left_out} for all, or adapter.experts: None",
        )  # fmt: skip
    if device != "cpu":
        _check_gpu(adapter, targets, formats)


def check_generation(formats: Collection[str], capability: tuple[int, int]) -> None:
    """Raises UnsupportedError (78) if no kernel with LoRA runs over these experts on this GPU.

    Args:
        formats: layouts of the experts that a LoRA adapts.
        capability: the GPU's CUDA compute capability.
    """
    if "MXFP4V4" in formats and capability[0] not in MARLIN_FP4:
        raise UnsupportedError(
            "LoRA on DeepSeek-V4's FP4 experts needs SGLang's Marlin kernels, which run on Hopper (9.0) and on 12.0, "
            f"and this GPU's compute capability is {capability[0]}.{capability[1]}",
            where="spec.adapter.experts", fix="write None, or adapter.type: OFT",
        )  # fmt: skip


def expert_arguments(experts: str, device: str, formats: Collection[str]) -> list[str]:
    """Flags for a server's command line."""
    if experts not in LORA_LAYOUTS:
        return []
    # Without an adapter to look at, SGLang would assume the second.
    shared = "--experts-shared-outer-loras" if experts == "SharedOuter" else "--no-experts-shared-outer-loras"
    if device == "cpu":
        return [shared]
    (runner,) = {MOE_RUNNERS[form] for form in formats}
    return [shared, "--lora-backend", "triton", "--moe-runner-backend", runner]


def _of_experts(layers: Collection[str]) -> list[str]:
    return [name for name in layers if ".experts." in name]


def _check_lora(adapter: AdapterConfig, targets: Collection[str]) -> None:
    missing = ", ".join(name for name in PROJECTIONS if name not in targets)
    if missing:
        raise UnsupportedError(
            f"SGLang adapts gate_proj, up_proj and down_proj of routed experts together, and {missing} has no adapter",
            where="spec.adapter.targets", fix=f"add {missing}, or write adapter.experts: None",
        )  # fmt: skip
    if math.frexp(adapter.scaling)[0] != 0.5:
        raise UnsupportedError(
            f"SGLang multiplies B of routed experts by alpha / rank, here {adapter.scaling:g}, and rounds it to BF16: "
            "only a power of two keeps the published values",
            where="spec.adapter.lora.alpha", fix=f"write {adapter.rank} or {2 * adapter.rank}",
        )  # fmt: skip


def _check_gpu(adapter: AdapterConfig, targets: Collection[str], formats: Collection[str]) -> None:
    if adapter.type == "OFT" and "down_proj" in targets:
        raise UnsupportedError(
            "on a GPU routed experts are one kernel, and the input of down_proj cannot be rotated inside it",
            where="spec.adapter.targets", fix="leave down_proj out, or write adapter.experts: None",
        )  # fmt: skip
    unknown = sorted(set(formats) - MOE_RUNNERS.keys())
    if adapter.type == "LoRA" and unknown:
        raise UnsupportedError(
            f"SGLang 0.5.23 has no LoRA on routed experts in {', '.join(unknown)}; it has on {', '.join(MOE_RUNNERS)}",
            where="spec.adapter.experts", fix="write None, or another checkpoint's address in model.uri",
        )  # fmt: skip
    if adapter.type == "LoRA" and len({MOE_RUNNERS[form] for form in formats}) > 1:
        raise UnsupportedError(
            f"the experts are packed as {', '.join(sorted(formats))}, and a server of SGLang has one runner for all",
            where="spec.adapter.experts", fix="write None, or another checkpoint's address in model.uri",
        )  # fmt: skip
