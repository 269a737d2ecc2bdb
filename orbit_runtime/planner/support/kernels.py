"""Kernels of SGLang 0.5.23 that multiply by a packed base on a GPU, and what they round: activations or the base
itself.

Belongs here: formats → the flags and variables that ask for kernels which round nothing, and what is rounded all the
same; layouts of routed experts → the runners of SGLang that multiply by them. Does not belong here: the trainer's own
rounding (`quant.activations`).

SGLang chooses for speed: FP8 weights are multiplied as W8A8, NVFP4 as W4A4, gpt-oss's MXFP4 as W4A8. A trainer with
`model.activationPrecision: WeightOnly` computes another policy than such an engine samples from. On Blackwell, DeepGEMM
takes only scales that are powers of two, and SGLang quantises block-wise FP8 weights anew for it: another base.
Sources: `--help`, `layers/quantization/{fp8,fp8_utils,modelopt_quant,mxfp4}.py`, `compressed_tensors.py` and
`model_loader/utils.py` of SGLang 0.5.23. Not run on hardware.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from orbit_runtime.model_info.weights import ModelFacts, Role, StoredWeight
from orbit_runtime.workers.servers.protocol import WEIGHT_ONLY_VARIABLE

DENSE: tuple[Role, ...] = ("attention", "dense_mlp", "shared_expert")
EXPERTS: tuple[Role, ...] = ("routed_expert",)
LATENT = ("deepseek_v3", "kimi_k2", "deepseek_v4")
"""Families whose attention reads the weights of `kv_b_proj` or `o_a_proj` itself, so that they must not be repacked."""
FP8_VARIABLE, DEEPGEMM_VARIABLE = "SGLANG_FORCE_FP8_MARLIN", "SGLANG_ENABLE_JIT_DEEPGEMM"
EXCHANGE = "moe-a2a-backend"
"""The engine argument that sends tokens to experts by programs which multiply with DeepGEMM alone."""
NVFP4_FLAG, MXFP4_FLAG, EXPERTS_FLAG = "--fp4-gemm-backend", "--flashinfer-mxfp4-moe-precision", "--moe-runner-backend"


@dataclass(frozen=True, slots=True)
class ExpertKernels:
    """Runners of SGLang over routed experts in one layout."""

    reporting: str
    """The one that takes its experts from SGLang's router, which is what is reported."""
    lora: str | None = None
    """The one with LoRA; None if no class describes to LoRA how the base is packed, by `get_triton_quant_info` or
    `get_marlin_quant_info`. For DeepSeek-V4's FP4 `sglang_plugin.mxfp4_experts` does. A test reads this from SGLang's
    source."""


EXPERT_KERNELS = {
    "BF16": ExpertKernels("triton", "triton"),
    "FP8Block": ExpertKernels("triton", "triton"),
    "FP8BlockV4": ExpertKernels("triton", "triton"),
    "FP8BlockCT": ExpertKernels("triton"),
    "FP8": ExpertKernels("triton"),
    "INT4": ExpertKernels("marlin", "marlin"),
    "INT4Asymmetric": ExpertKernels("marlin", "marlin"),
    "GPTQ": ExpertKernels("marlin"),
    "GPTQv2": ExpertKernels("marlin"),
    "AWQ": ExpertKernels("marlin"),
    "NVFP4ModelOpt": ExpertKernels("flashinfer_cutlass", "marlin"),
    "NVFP4": ExpertKernels("flashinfer_cutlass"),
    "MXFP4V4": ExpertKernels("marlin", "marlin"),
    "MXFP4GptOss": ExpertKernels("marlin"),
    "MXFP4": ExpertKernels("marlin"),
}
"""Kernels by the layout of the experts, as `quant` names it."""
FP8_BLOCKS, MXFP4 = {"deepseek_v4": "FP8BlockV4"}, {"deepseek_v4": "MXFP4V4", "gpt_oss": "MXFP4GptOss"}
"""Family → its own layout."""
LORA_RUNNERS = {layout: kernels.lora for layout, kernels in EXPERT_KERNELS.items() if kernels.lora}


@dataclass(frozen=True, slots=True)
class EngineKernels:
    """Kernels that a server on a GPU is started with."""

    arguments: tuple[str, ...]
    variables: Mapping[str, str]
    rounded: tuple[str, ...]
    """Layers whose inputs SGLang rounds and the trainer does not. Example: `("routed experts in FP8",)`"""
    requantised: bool
    """Whether, on Blackwell, SGLang quantises the base anew."""
    keeps_fp8: bool
    """Whether projections that SGLang fuses keep a scale each, in FP8 with a scale for a whole tensor."""
    family: str


def choose_kernels(
    model: ModelFacts,
    activations: str,
    *,
    adapts_experts: bool,
    engine_arguments: Mapping[str, Any],
    reports_experts: bool = False,
) -> EngineKernels:
    """
    Args:
        activations: `model.activationPrecision`.
        adapts_experts: whether LoRA adapts routed experts, whose kernels are then chosen for it.
        engine_arguments: `rollout.engineArguments`.
        reports_experts: whether completions report the experts of their tokens.
    """
    arguments: list[str] = []
    variables: dict[str, str] = {}
    rounded: list[str] = []
    dense, experts = _formats(model, DENSE), _formats(model, EXPERTS)
    if activations != "NVFP4":
        if "NVFP4" in dense:
            arguments += [NVFP4_FLAG, "marlin"]
        if "NVFP4" in experts and not adapts_experts:
            arguments += [EXPERTS_FLAG, "marlin"]
    if activations != "FP8":
        if "FP8" in dense and _has_weight_only_fp8(model):
            variables |= {FP8_VARIABLE: "1", WEIGHT_ONLY_VARIABLE: "1"}
        elif "FP8" in dense:
            rounded.append("linear layers in FP8")
        if "FP8" in experts:
            rounded.append("routed experts in FP8")
    if "MXFP4" in experts:
        if model.architecture.family == "gpt_oss":
            arguments += [MXFP4_FLAG, "bf16"]
        elif not adapts_experts:
            rounded.append("routed experts in MXFP4")
    # DeepSeek-V4's scales are powers of two as they are, and its attention needs DeepGEMM.
    is_blockwise = model.architecture.family != "deepseek_v4" and _has_blocks_of_fp8(model, (*DENSE, *EXPERTS))
    exchanges = engine_arguments.get(EXCHANGE, "none") != "none"
    if is_blockwise and not exchanges:
        variables[DEEPGEMM_VARIABLE] = "0"
    if reports_experts and not (adapts_experts or exchanges or EXPERTS_FLAG in arguments):
        arguments += _reporting_runner(model, experts)
    return EngineKernels(
        tuple(arguments),
        variables,
        tuple(rounded),
        requantised=is_blockwise and exchanges,
        # ModelOpt's class quantises them under the largest one before it does anything else.
        keeps_fp8=FP8_VARIABLE in variables and model.quantised_by != "modelopt",
        family=model.architecture.family,
    )


def _reporting_runner(model: ModelFacts, formats: Collection[str]) -> list[str]:
    """SGLang's own choice on Blackwell (`flashinfer_trtllm`), and for gpt-oss everywhere, picks experts inside the
    kernel: 0.5.23 then reports expert 0 for every token. DeepSeek-V4's routers are not replayed."""
    if model.architecture.family == "deepseek_v4" or not formats:
        return []
    # Of experts in several formats one runner must hold all; Triton's has the fewest conditions.
    runners = {EXPERT_KERNELS[layout].reporting for layout in expert_layouts(model)} if len(formats) == 1 else ()
    return [EXPERTS_FLAG, *runners] if len(runners) == 1 else [EXPERTS_FLAG, "triton"]


def expert_layouts(model: ModelFacts) -> tuple[str, ...]:
    """Layouts of the routed experts, as `quant` names them. INT4 with zero points, which SGLang computes alike, is not
    distinguished.
    """
    experts = [each for each in model.weights if each.weight.is_linear and each.weight.role in EXPERTS]
    return tuple(sorted({_layout(each, model) for each in experts}))


def _layout(stored: StoredWeight, model: ModelFacts) -> str:
    family, writer = model.architecture.family, model.quantised_by
    if stored.format == "INT4":
        return {"gptq": "GPTQ", "awq": "AWQ"}.get(writer, "INT4")
    if stored.format == "FP8" and stored.block:
        return "FP8BlockCT" if writer == "compressed-tensors" else FP8_BLOCKS.get(family, "FP8Block")
    if stored.format == "NVFP4":
        return "NVFP4" if writer == "compressed-tensors" else "NVFP4ModelOpt"
    return MXFP4.get(family, "MXFP4") if stored.format == "MXFP4" else stored.format


def _formats(model: ModelFacts, roles: Collection[Role]) -> set[str]:
    return {each.format for each in model.weights if each.weight.is_linear and each.weight.role in roles}


def _has_weight_only_fp8(model: ModelFacts) -> bool:
    """False beside latent attention, and for blocks that compressed-tensors wrote."""
    if model.architecture.family in LATENT:
        return False
    return not (model.quantised_by == "compressed-tensors" and _has_blocks_of_fp8(model, DENSE))


def _has_blocks_of_fp8(model: ModelFacts, roles: Collection[Role]) -> bool:
    return any(each.format == "FP8" and each.block for each in model.weights if each.weight.role in roles)
